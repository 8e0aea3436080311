"""Evaluate every algorithm of models/demo/results.json with `tokenrouter eval` and compare all digits.

    python tests/python/reproduce_results.py PROGRAM [ALGORITHM …]

PROGRAM is a built `tokenrouter` with its plugins beside it. Takes minutes; not part of the test run.
Exits with 1 where anything differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVAL = ["--dataset", str(ROOT / "models/demo/eval.jsonl"), "--max-tokens", "300", "--seed", "0",
        "--answer-pattern", r"Answer: (\d+)\s*$"]


def sweep(algorithm, rows):
    """The values of the sweep, as `--sweep` takes them."""
    if algorithm != "me":
        return "threshold=" + ",".join(repr(row["threshold"]) for row in rows)
    tables = []
    for row in rows:
        large = row["threshold"]
        weights = {"small": (1 - large) * 5 / 8, "medium": (1 - large) * 3 / 8, "large": large}
        tables.append("{ " + ", ".join(f"{name} = {weight!r}" for name, weight in weights.items()) + " }")
    return "weights=[" + ", ".join(tables) + "]"


def evaluate(program, route, sweeps):
    with tempfile.TemporaryDirectory() as directory:
        output = os.path.join(directory, "out.json")
        command = [program, "eval", str(ROOT / "config/demo.toml"), "--route", route, *EVAL, "--output", output]
        command += ["--sweep", sweeps] if sweeps else []
        # The reference draws its writers by Python's generator, seeded by the index of the question.
        environment = {**os.environ, "TOKENROUTER__ROUTES__ME__SETTINGS__GENERATOR": "python"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        with open(output) as f:
            return json.load(f)["points"]


def differences(point, want):
    got = {"accuracy": point["accuracy"], "mean_tokens": point["mean_tokens"],
           "switches_per_request": point["switches_per_request"]}
    got |= {f"share of {name}": share for name, share in point["token_share"].items()}
    expected = {key: want[key] for key in ("accuracy", "mean_tokens", "switches_per_request")}
    expected |= {f"share of {name}": share for name, share in want["share"].items()}
    keys = sorted(set(got) | set(expected))
    return [f"{key} {got.get(key, 0.0)!r}, not {expected.get(key, 0.0)!r}" for key in keys
            if abs(got.get(key, 0.0) - expected.get(key, 0.0)) > 1e-12]


def main():
    program, only = sys.argv[1], sys.argv[2:]
    with open(ROOT / "models/demo/results.json") as f:
        results = json.load(f)
    work = [(name, [row], None) for name, row in results["alone"].items()]
    work += [(name, entry["rows"], sweep(name, entry["rows"])) for name, entry in results["routed"].items()]
    compared, different = 0, 0
    for route, rows, sweeps in work:
        if only and route not in only:
            continue
        for point, want in zip(evaluate(program, route, sweeps), rows, strict=True):
            found = differences(point, want)
            compared += 1
            different += bool(found)
            print(f"{route} {want['threshold']}: {100 * point['accuracy']:.1f} %",
                  "; ".join(found) or "the same in all digits", flush=True)
    print(f"{compared} points compared, {different} differ")
    sys.exit(1 if different or not compared else 0)


if __name__ == "__main__":
    main()
