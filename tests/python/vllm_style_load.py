"""Measures a closed load from outside, as vLLM's `bench serve` does, and compares with `tokenrouter bench --url`.

Both measure in turns, so that both meet the same machine. By hand, with what requirements.txt has:

    target/release/tokenrouter serve config/demo.toml --port 8000
    python tests/python/vllm_style_load.py --url http://127.0.0.1:8000 --model large \
        --bench target/release/tokenrouter

The ratio is the median of the rounds'. The exit status is 1 where it differs from 1 by more than --within. This client
takes more of the processor than `tokenrouter bench`, which shows where the server has no core to spare.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time

import httpx

COMPARED = ["output_throughput", "request_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"]


async def ask(client, arguments, prompt):
    """Times of one answer as vLLM's client takes them, and its tokens."""
    body = {
        "model": arguments.model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": arguments.output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = last = time.perf_counter()
    ttft, gaps, tokens = None, [], 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"]:
                now = time.perf_counter()
                if ttft is None:
                    ttft = now - start
                elif event["choices"][0]["text"]:
                    gaps.append(now - last)
                last = now
            elif event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return {"ttft": ttft, "gaps": gaps, "latency": last - start, "tokens": tokens}


async def load(arguments, seed):
    """One load, by the names of vLLM's result."""
    drawn = random.Random(seed)
    prompts = [drawn.choices(range(arguments.vocab_size), k=arguments.input_len) for _ in range(arguments.total)]
    turn = asyncio.Semaphore(arguments.requests)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=None, limits=limits) as client:

        async def one(prompt):
            async with turn:
                return await ask(client, arguments, prompt)

        # Opens the connections.
        await asyncio.gather(*map(one, prompts[: arguments.requests]))
        start = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        duration = time.perf_counter() - start

    def mean(values):
        return 1000 * statistics.fmean(values)

    return {
        "output_throughput": sum(a["tokens"] for a in answers) / duration,
        "request_throughput": len(answers) / duration,
        "mean_ttft_ms": mean(a["ttft"] for a in answers),
        "mean_tpot_ms": mean((a["latency"] - a["ttft"]) / (a["tokens"] - 1) for a in answers),
        "mean_itl_ms": mean(gap for a in answers for gap in a["gaps"]),
        "mean_e2el_ms": mean(a["latency"] for a in answers),
    }


def bench(arguments, seed):
    """The same load by `tokenrouter bench`."""
    command = [arguments.bench, "bench", "--url", arguments.url, "--model", arguments.model, "--seed", str(seed)]
    for name in ["requests", "total", "input_len", "output_len", "vocab_size"]:
        command += ["--" + name.replace("_", "-"), str(getattr(arguments, name))]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([*command, "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        (result,) = json.load(open(file.name))["loads"]
    if result["failed"]:
        sys.exit(f"{result['failed']} requests failed: {result['failures']}")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bench", required=True, help="the tokenrouter program")
    parser.add_argument("--requests", type=int, default=4, help="requests always under way")
    parser.add_argument("--total", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", type=float, default=0.05)
    arguments = parser.parse_args()
    outside, own = [], []
    for seed in range(arguments.rounds):
        # Neither is always the first after the other.
        measures = [(outside, lambda: asyncio.run(load(arguments, seed))), (own, lambda: bench(arguments, seed))]
        for results, measure in measures if seed % 2 else reversed(measures):
            results.append(measure())
    differs = False
    print(f"{'medians of ' + str(arguments.rounds):22}{'outside':>12}{'bench':>12}{'ratio':>8}")
    for key in COMPARED:
        theirs, ours = (statistics.median(result[key] for result in results) for results in (outside, own))
        ratio = statistics.median(b[key] / a[key] for a, b in zip(outside, own))
        differs |= abs(ratio - 1) > arguments.within
        print(f"{key:22}{theirs:12.3f}{ours:12.3f}{ratio:8.3f}")
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
