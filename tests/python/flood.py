"""Measures what a flood of connections costs the clients that behave.

By hand, with Python 3.11 alone, on two cores: one for the server, one for all others.

    taskset -c 0 target/release/tokenrouter serve config/demo.toml --port 8000
    taskset -c 1 python tests/python/flood.py --port 8000 --model small

Some clients ask for short answers one after another, first alone and then while a process of low priority opens
connections from another address, so many a second: silent ones, half requests, bad ones, heads and bodies that come byte
by byte, a hundred requests at once whose answers nobody reads, bodies that wait for `100 Continue`, heads of 1 MB. Shown are
the 50th and 99th percentile of an answer's time in both phases, and their ratios.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time

POST = b"POST /v1/completions HTTP/1.1\r\nhost: f\r\ncontent-type: application/json\r\n"
# What is sent at once, and what follows byte by byte.
SENT = [
    (b"", b""),
    (b"POST /v1/completions HT", b""),
    (b"GET /nowhere HTTP/1.1\r\nhost: f\r\n\r\n", b""),
    (b"\x01\x02\r\n\r\n", b""),
    (b"GET /health HTTP/1.1\r\n", b"x-slow: " + b"a" * 1000),
    (POST + b"content-length: 1000\r\n\r\n{", b" " * 998),
    (b"GET /health HTTP/1.1\r\nhost: f\r\n\r\n" * 100, b""),
    (POST + b"content-length: 1000\r\nexpect: 100-continue\r\n\r\n", b""),
    (b"GET /health HTTP/1.1\r\nhost: f\r\nx-long: " + b"a" * (1 << 20) + b"\r\n\r\n", b""),
]


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


async def attack(port, number, seconds):
    """One connection, kept for so many seconds."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    except OSError:
        return
    once, slowly = SENT[number % len(SENT)]
    end = time.monotonic() + seconds
    try:
        writer.write(once)
        for i in range(len(slowly)):
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.2)
            writer.write(slowly[i : i + 1])
        await asyncio.sleep(max(0, end - time.monotonic()))
    except OSError:
        pass
    finally:
        writer.close()


async def flood(arguments):
    """The attacking process: starts connections at an even rate until it is killed."""
    os.nice(19)
    tasks, number, start = set(), 0, time.monotonic()
    while True:
        while number < (time.monotonic() - start) * arguments.rate:
            task = asyncio.create_task(attack(arguments.port, number, arguments.held / arguments.rate))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
            if number % 100 == 0:
                print(number, flush=True)
        await asyncio.sleep(0.002)


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
    parser.add_argument("--rate", type=float, default=500, help="connections of the flood a second")
    parser.add_argument("--held", type=int, default=500, help="connections that the flood keeps open")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--flood", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        await flood(arguments)
    results, opened = [], ["0"]
    for flooded in [False, True]:
        attacker = subprocess.Popen([sys.executable, *sys.argv, "--flood"], stdout=subprocess.PIPE, text=True) if flooded else None
        end, times = time.perf_counter() + arguments.seconds, []
        await asyncio.gather(*(client(arguments, end, times) for _ in range(arguments.clients)))
        if attacker:
            attacker.kill()
            opened += attacker.communicate()[0].split()
        results.append(shown("flooded" if flooded else "alone", times))
    (p50, p99), (flooded50, flooded99) = results
    print(f"{opened[-1]} connections of the flood; ratio p50 {flooded50 / p50:.2f}, p99 {flooded99 / p99:.2f}")


asyncio.run(main())
