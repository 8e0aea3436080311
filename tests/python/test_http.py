"""What clients other than OpenAI's see: raw bodies, the native endpoint, connections that break."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from servers import wait_until_idle

CHAT = {"model": "rstitch", "messages": [{"role": "user", "content": "What is 47 * 83?"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("PUT", "/v1/chat/completions", "{}", 405),
        ("POST", "/v1/chat/completions", "{", 400),
        ("POST", "/v1/chat/completions", "", 400),
        ("POST", "/v1/chat/completions", "null", 400),
        ("POST", "/v1/chat/completions", '{"model": "small", "messages": "\\ud83d"}', 400),
        ("POST", "/v1/chat/completions", '{"temperature": NaN}', 400),
        ("POST", "/v1/completions", '{"model": "small"}', 400),
        ("POST", "/generate", '{"model": "small"}', 400),
    ],
)
def test_errors_have_one_shape(http, method, path, body, status):
    answer = http.request(method, path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str) and error["message"]


def test_frames(http):
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        text = "".join(answer.iter_text())
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""] and text.count("[DONE]") == 1
    for frame in frames[:-2]:
        assert frame.startswith(("data: {", ": "))
        assert "\n" not in frame
        if frame.startswith("data"):
            json.loads(frame.removeprefix("data: "))


def test_generate(http):
    body = {"model": "rstitch", "text": "The total is", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    whole = http.post("/generate", json=body).json()
    assert len(whole["output_ids"]) == whole["meta_info"]["completion_tokens"]
    with http.stream("POST", "/generate", json=body | {"stream": True}) as answer:
        frames = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    last = json.loads(frames[-1])
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_request_id(http):
    assert http.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    made = [http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave(url, stream):
    """Connections that break while an answer is being made leave nothing behind."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(CHAT | {"stream": stream, "ignore_eos": True, "max_tokens": 1900, "n": 4}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for read in (0, 0, 1, 200) if stream else (0, 0, 0):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
            if read:
                connection.recv(read)
            else:
                time.sleep(0.05)
    wait_until_idle(url)


def test_neighbours_do_not_change_an_answer(url, http):
    """The same seed gives the same text alone and in company."""
    def ask(seed):
        body = CHAT | {"seed": seed, "temperature": 1.5, "max_tokens": 60}
        return http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        company = list(pool.map(ask, [0, 1, 2, 3, 0, 1, 2, 3]))
    assert company == alone * 2
    wait_until_idle(url)
