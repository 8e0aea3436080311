"""Serves many clients for a long time, then stops: nothing may fail, grow or stay behind.

By hand, on Linux, with Python 3.11 alone:

    python tests/python/soak.py target/release/tokenrouter config/demo.toml

Starts the server. Clients, each on a connection that it keeps, ask for chats and completions of random lengths, streamed
and not, at routes and bare models. Shown each minute: answers, memory and open files of the server. The pools of K/V, whose
pages are resident once they were used, are counted apart: they are mappings of 64 MiB and more. Memory is compared from when
they no longer grow. Then the gauges must
be back at zero. At last SIGTERM arrives while streams are open: all must finish, and the server end with status 0.
Ends with status 1 if anything of that does not hold.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

STREAMED = 1500  # tokens of a stream at SIGTERM; one must not end before all have begun
GAUGES = ["tokenrouter_live_requests", "tokenrouter_queued_requests", "tokenrouter_model_requests", "tokenrouter_kv_pages_used",
          "vllm:num_requests_running", "vllm:num_requests_waiting"]
PROMPTS = ["1 + 1 =", "A farmer has 12 cows and buys 7 more. How many has he?", "Write a long story. " * 20]


class Failure(Exception):
    pass


class Connection:
    def __init__(self, port):
        self.port, self.reader, self.writer = port, None, None

    async def ask(self, method, path, body=None):
        """Status and body of one answer. The connection stays."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split()[1])
        if length := re.search(r"content-length: (\d+)", head):
            return status, await self.reader.readexactly(int(length[1]))
        if "transfer-encoding: chunked" not in head:
            raise Failure(f"an answer without a length: {head!r}")
        parts = []
        while size := int(await self.reader.readline(), 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        if "connection: close" in head:
            self.close()
        return status, b"".join(parts)

    def close(self):
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def request(draw, models, most_tokens):
    tokens = draw.randint(1, most_tokens)
    body = {"model": draw.choice(models), "max_tokens": tokens, "ignore_eos": True, "seed": draw.randrange(1 << 30),
            "temperature": draw.choice([0, 1])}
    stream = draw.random() < 0.5
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if draw.random() < 0.5:
        body["messages"] = [{"role": "user", "content": draw.choice(PROMPTS)}]
        return "/v1/chat/completions", body, stream, tokens
    return "/v1/completions", body | {"prompt": draw.choice(PROMPTS)}, stream, tokens


def check(status, data, stream, tokens):
    """An answer must be whole and have as many tokens as were asked for."""
    if status != 200:
        raise Failure(f"status {status}: {data[:300]!r}")
    if stream:
        events = [event for event in data.decode().split("\n\n") if event]
        if events[-1] != "data: [DONE]":
            raise Failure(f"the stream ends with {events[-1]!r}")
        usage = json.loads(events[-2].removeprefix("data: "))["usage"]
    else:
        usage = json.loads(data)["usage"]
    if usage["completion_tokens"] != tokens:
        raise Failure(f"{usage['completion_tokens']} tokens instead of {tokens}")


async def client(number, arguments, models, end, counts):
    draw, connection = random.Random(number), Connection(arguments.port)
    while time.monotonic() < end:
        path, body, stream, tokens = request(draw, models, arguments.tokens)
        try:
            check(*await connection.ask("POST", path, body), stream, tokens)
            counts["answers"] += 1
            counts["tokens"] += tokens
        except (Failure, OSError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
            counts["failed"] += 1
            print(f"client {number}, {path} {body['model']}, stream {stream}: {error!r}", flush=True)
            connection.close()
    connection.close()


def samples(text, name):
    return [float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)]


async def metrics(port):
    connection = Connection(port)
    _, data = await connection.ask("GET", "/metrics")
    connection.close()
    return data.decode()


def memory(process):
    """Resident MiB of the process: without large mappings, and those."""
    small = large = 0
    with open(f"/proc/{process}/smaps") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "Size":
                size = int(value.split()[0])
            elif name == "Rss" and size >= 64 << 10:
                large += int(value.split()[0])
            elif name == "Rss":
                small += int(value.split()[0])
    return small / 1024, large / 1024


async def watch(arguments, server, end, counts, seen):
    """Memory and files of the server, each minute."""
    start = time.monotonic()
    while (now := time.monotonic()) < end:
        await asyncio.sleep(min(60, end - now))
        (small, large), files = memory(server.pid), samples(await metrics(arguments.port), "process_open_fds")[0]
        seen.append((time.monotonic() - start, small, files, large))
        print(f"{(time.monotonic() - start) / 60:5.1f} min {counts['answers']:8} answers {counts['tokens']:9} tokens "
              f"{counts['failed']:3} failed {small:7.1f} MiB and {large:7.1f} of pools {files:5.0f} files", flush=True)


async def ready(port, server):
    while server.poll() is None:
        try:
            connection = Connection(port)
            status, data = await connection.ask("GET", "/ready")
            connection.close()
            if status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server did not start")


async def zero(port):
    """Names of gauges that do not return to zero within ten seconds."""
    for _ in range(100):
        text = await metrics(port)
        left = [name for name in GAUGES if any(samples(text, name))]
        missing = [name for name in GAUGES if not samples(text, name)]
        if missing:
            return [f"{name} (not there)" for name in missing]
        if not left:
            return []
        await asyncio.sleep(0.1)
    return left


async def stop_with_streams(arguments, models, server):
    """Streams that were open at SIGTERM and did not finish, and the status of the server."""
    body = {"prompt": "1 + 1 =", "max_tokens": STREAMED, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    connections = [Connection(arguments.port) for _ in range(arguments.streams)]
    streams = [asyncio.create_task(connection.ask("POST", "/v1/completions", body | {"model": models[i % len(models)]}))
               for i, connection in enumerate(connections)]
    while sum(samples(await metrics(arguments.port), "vllm:num_requests_running")) < arguments.streams:
        if any(stream.done() for stream in streams):
            raise SystemExit("a stream ended before all had begun; ask for more tokens")
        await asyncio.sleep(0.05)
    server.send_signal(signal.SIGTERM)
    broken = 0
    for result in await asyncio.gather(*streams, return_exceptions=True):
        try:
            if isinstance(result, BaseException):
                raise Failure(repr(result))
            check(*result, True, STREAMED)
        except (Failure, ValueError, KeyError, IndexError) as error:
            broken += 1
            print(f"at SIGTERM: {error!r}")
    return broken, await asyncio.to_thread(server.wait, 120)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="the program")
    parser.add_argument("config", help="its configuration")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=3, help="least minutes until memory is looked at")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--streams", type=int, default=64, help="open at SIGTERM")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        arguments.port = free.getsockname()[1]
    # However slow the machine is, streams may end.
    patient = os.environ | {"TOKENROUTER__SERVER__DRAIN_TIMEOUT": "600"}
    server = subprocess.Popen([arguments.server, "serve", arguments.config, "--port", str(arguments.port), "--log", "warn"], env=patient)
    try:
        await ready(arguments.port, server)
        connection = Connection(arguments.port)
        models = [model["id"] for model in json.loads((await connection.ask("GET", "/v1/models"))[1])["data"]]
        connection.close()
        end, counts, seen = time.monotonic() + arguments.minutes * 60, {"answers": 0, "tokens": 0, "failed": 0}, []
        print(f"{arguments.clients} clients, {arguments.minutes} minutes, at {', '.join(models)}", flush=True)
        clients = [client(i, arguments, models, end, counts) for i in range(arguments.clients)]
        await asyncio.gather(watch(arguments, server, end, counts, seen), *clients)
        left = await zero(arguments.port)
        broken, status = await stop_with_streams(arguments, models, server)
    finally:
        server.kill()
    # While pages are used for the first time, so is what is kept about them.
    warm = [now for before, now in zip(seen, seen[1:]) if now[0] >= arguments.warm_up * 60 and now[3] == before[3]] or seen[-1:]
    first, last = warm[0], warm[-1]
    growth, files = last[1] / first[1] - 1, last[2] - first[2]
    print(f"{counts['answers']} answers, {counts['tokens']} tokens, {counts['failed']} failed; memory {first[1]:.1f} to {last[1]:.1f} MiB "
          f"({growth:+.1%}; most {max(entry[1] for entry in warm):.1f}), files {first[2]:.0f} to {last[2]:.0f}")
    print(f"gauges that are not zero: {', '.join(left) or 'none'}; {arguments.streams - broken} of {arguments.streams} streams finished "
          f"after SIGTERM, status {status}")
    sys.exit(bool(counts["failed"] or left or broken or status or growth > 0.05 or files > 8))


asyncio.run(main())
