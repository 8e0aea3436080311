"""Measures what a flood of connections costs the clients that behave.

By hand, with Python 3.11 alone:

    target/release/tokenrouter serve config/demo.toml --port 8000
    python tests/python/flood.py --port 8000 --model small

Some clients ask for short answers one after another, first alone and then while others open connections as fast as they
can: silent, with half a request, with a bad one. Shown are the 50th and 99th percentile of an answer's time in both
phases, and their ratios.
"""

import argparse
import asyncio
import json
import statistics
import time

SENT = [b"", b"POST /v1/completions HT", b"GET /nowhere HTTP/1.1\r\nhost: f\r\n\r\n", b"\x01\x02\r\n\r\n"]


async def answer(arguments):
    """Seconds that one answer takes, on a connection of its own."""
    body = json.dumps({"model": arguments.model, "prompt": "1 + 1 =", "max_tokens": 8, "ignore_eos": True}).encode()
    key = f"authorization: Bearer {arguments.key}\r\n" if arguments.key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: f\r\n{key}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", arguments.port)
    writer.write(head.encode() + body)
    text = await reader.read()
    writer.close()
    return time.perf_counter() - begin, text.startswith(b"HTTP/1.1 200")


async def client(arguments, end, times):
    while time.perf_counter() < end:
        try:
            seconds, good = await answer(arguments)
        except OSError:
            good = False
        times.append(seconds if good else None)


async def attacker(arguments, end, opened):
    while time.perf_counter() < end:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", arguments.port)
            writer.write(SENT[len(opened) % len(SENT)])
            opened.append(writer)
            if len(opened) > arguments.held:
                opened[len(opened) - arguments.held - 1].close()
        except OSError:
            await asyncio.sleep(0.01)


def shown(name, times):
    good = sorted(seconds for seconds in times if seconds is not None)
    p50, p99 = statistics.median(good), good[min(len(good) - 1, int(len(good) * 0.99))]
    print(f"{name:8} {len(good):6} answers, {len(times) - len(good):4} failed, p50 {p50 * 1e3:8.1f} ms, p99 {p99 * 1e3:8.1f} ms")
    return p50, p99


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--model", default="small")
    parser.add_argument("--key", help="API key of the clients")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--attackers", type=int, default=8)
    parser.add_argument("--held", type=int, default=500, help="connections that the flood keeps open")
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    results = []
    for name, attackers in [("alone", 0), ("flooded", arguments.attackers)]:
        end, times, opened = time.perf_counter() + arguments.seconds, [], []
        tasks = [client(arguments, end, times) for _ in range(arguments.clients)]
        tasks += [attacker(arguments, end, opened) for _ in range(attackers)]
        await asyncio.gather(*tasks)
        results.append(shown(name, times))
        for writer in opened:
            writer.close()
    (p50, p99), (flooded50, flooded99) = results
    print(f"{len(opened)} connections of the flood; ratio p50 {flooded50 / p50:.2f}, p99 {flooded99 / p99:.2f}")


asyncio.run(main())
