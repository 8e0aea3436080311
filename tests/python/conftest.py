"""A running server for the tests that drive it with real clients.

TOKENROUTER_BIN is the program (default: target/debug/tokenrouter), TOKENROUTER_CONFIG its configuration
(default: config/demo.toml).
"""

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Base address of a server that is ready."""
    program = os.environ.get("TOKENROUTER_BIN", str(ROOT / "target/debug/tokenrouter"))
    config = os.environ.get("TOKENROUTER_CONFIG", str(ROOT / "config/demo.toml"))
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        server = subprocess.Popen([program, "serve", config, "--port", str(port)], stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.poll() is None, f"the server has ended:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"the server is not ready:\n{log.read_text()}"
        try:
            if httpx.get(f"{address}/ready").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    yield address
    server.terminate()
    assert server.wait(timeout=60) == 0, log.read_text()


@pytest.fixture(scope="session")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def http(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.fixture(scope="session", params=["small", "large", "rstitch", "me"])
def model(request):
    """Bare models and routes."""
    return request.param


@pytest.fixture(scope="session")
def byte_tokens():
    """Token ids of single bytes, in the demo models' tokenizer."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in itself]
    alphabet = {b: chr(b) for b in itself} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    vocabulary = json.loads((ROOT / "models/demo/small/tokenizer.json").read_text())["model"]["vocab"]
    return {b: vocabulary[c] for b, c in alphabet.items()}
