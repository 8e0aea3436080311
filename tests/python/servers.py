"""Servers of the tests, and the programs that drive them from outside of this process.

TOKENROUTER_BIN is the program (default: target/debug/tokenrouter), TOKENROUTER_CONFIG its configuration
(default: config/demo.toml).
"""

import json
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("TOKENROUTER_BIN", ROOT / "target/debug/tokenrouter"))
CONFIG = os.environ.get("TOKENROUTER_CONFIG", str(ROOT / "config/demo.toml"))
START_SECONDS = 120
# Two clients of the guarded server, and how many answers it has room for.
KEYS = ("key-of-the-first-client", "key-of-the-second-client")
ROOM = 8


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def serving(log, **settings):
    """Base address of a server that is ready. `settings` are keys of `[server]` beside the configuration's."""
    port = free_port()
    environment = os.environ | {f"TOKENROUTER__SERVER__{key.upper()}": str(value) for key, value in settings.items()}
    with log.open("w") as out:
        command = [PROGRAM, "serve", CONFIG, "--port", str(port)]
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    try:
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
    finally:
        server.terminate()
        code = server.wait(timeout=60)
    assert code == 0, log.read_text()


def wait_until_idle(address):
    """Wait until no request is under way."""
    deadline = time.monotonic() + 60
    while httpx.get(f"{address}/ready").json()["live_requests"]:
        assert time.monotonic() < deadline, "requests are left over"
        time.sleep(0.02)


@contextmanager
def occupied(address, answers, key):
    """As many answers under way, of a client that does not read them, until the block is left or what it is
    given is called."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({
        "model": "large", "messages": [{"role": "user", "content": "Count."}], "n": answers, "stream": True,
        # More than the buffers of a connection hold: the answers wait for their reader.
        "ignore_eos": True, "max_tokens": 1900, "logprobs": True, "top_logprobs": 20, "return_routing": True,
    }).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        yield connection.close
    wait_until_idle(address)


def run(command, **environment):
    """Output of a client that is a program. It must succeed, and reaches no host but this one."""
    # A proxy that answers nothing: a client that asks another host fails.
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    here = nowhere | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    result = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=os.environ | here | environment, capture_output=True, text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout
