"""What the tests of llama.cpp's server check from outside, asked of this one in our own words.

docs/compatibility.md lists which of their groups apply.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from servers import KEYS, wait_until_idle

BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is 47 * 83?"}]
INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generate(http, text="The total is", **sampling):
    fields = {"max_new_tokens": 16, "temperature": 0} | sampling
    return post(http, "/generate", model="small", text=text, sampling_params=fields)


# --- Chats ---

@pytest.mark.parametrize(
    "messages",
    [
        None, "string", 123, {}, [], [123], [None], [[]], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": 123, "content": "x"}], [{"role": "user", "content": 123}], [{"role": "user", "content": {}}],
        [{"role": "user", "content": [123]}], [{"role": "user", "content": [{"type": "sound"}]}],
        [{"role": "user", "content": "x"}, {}],
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_messages_that_are_none(http, messages, stream):
    answer = http.post("/v1/chat/completions", json={"model": "small", "messages": messages, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize(("max_tokens", "reason"), [(4, "length"), (200, "stop")])
def test_why_an_answer_ends(http, max_tokens, reason):
    body = post(http, "/v1/chat/completions", model="large", messages=BOOK, max_tokens=max_tokens, temperature=0)
    assert body["choices"][0]["finish_reason"] == reason
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == "large"
    assert (body["usage"]["completion_tokens"] == max_tokens) == (reason == "length")


def test_chunks_of_one_stream_belong_together(client):
    chunks = list(client.chat.completions.create(model="small", messages=BOOK, max_tokens=16, stream=True))
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "small", "chat.completion.chunk")
    }
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, stream):
    fields = {"model": "small", "messages": BOOK, "max_tokens": 12, "temperature": 0}
    fields |= {"logprobs": True, "top_logprobs": 4}
    if stream:
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **fields)]
        text = "".join(choice.delta.content or "" for choice in choices)
        content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        text, content = choice.message.content, choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == text
    for token in content:
        tops = [top.logprob for top in token.top_logprobs]
        assert token.logprob <= 0 and tops == sorted(tops, reverse=True) and len(tops) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_context_that_is_exceeded(client, stream):
    """An error before the first byte, also of a stream, with the numbers in its message."""
    messages = [{"role": "user", "content": "Lily and her friends " * 600}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=messages, stream=stream)
    assert caught.value.code == "context_length_exceeded" and "2048" in caught.value.message


def test_context_that_runs_out(http):
    """Contexts are not shifted: the answer ends where the context does."""
    body = generate(http, "Lily", max_new_tokens=2047, ignore_eos=True)
    meta = body["meta_info"]
    assert meta["prompt_tokens"] + meta["completion_tokens"] == 2048 and meta["finish_reason"]["type"] == "length"


def test_two_choices(http):
    body = post(http, "/v1/chat/completions", model="small", messages=BOOK, n=2, max_tokens=16, temperature=1, seed=4)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"] != body["choices"][1]["message"]


def test_a_message_that_is_begun(client):
    """The answer goes on where the last message of the assistant stops."""
    whole = client.chat.completions.create(model="large", messages=BOOK, temperature=0).choices[0].message.content
    begun, rest = whole[:9], whole[9:]
    messages = [*BOOK, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(model="large", messages=messages, temperature=0, extra_body=fields)
    assert answer.choices[0].message.content == rest


# --- Forms ---

@pytest.mark.parametrize(
    "form",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": INTEGER}},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"const": "42"}}},
    ],
    ids=json.dumps,
)
def test_forms(http, form):
    body = post(http, "/v1/chat/completions", model="rstitch", messages=BOOK, response_format=form, max_tokens=300)
    choice = body["choices"][0]
    if form["type"] == "json_schema":
        value = json.loads(choice["message"]["content"])
        assert value == "42" or isinstance(value["n"], int)
    elif form["type"] == "json_object":
        assert choice["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    "form",
    [
        {"type": "sound"}, {"type": 123}, {"type": []}, "json_object",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": 123}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 123}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}},
        {"type": "json_schema", "json_schema": 7},
    ],
    ids=json.dumps,
)
def test_forms_that_are_none(http, form):
    answer = http.post("/v1/chat/completions", json={"model": "small", "messages": BOOK, "response_format": form})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("response_format")


def test_grammar(http):
    body = generate(http, ebnf='start: "yes" | "no"')
    assert body["text"] in ("yes", "no")
    answer = http.post("/generate", json={"model": "small", "text": "x", "sampling_params": {"ebnf": "start: ("}})
    assert answer.status_code == 400


# --- Completions ---

def test_tokens_as_a_prompt(http):
    ids = post(http, "/tokenize", model="small", prompt="The total is")["tokens"]
    by_ids = post(http, "/v1/completions", model="small", prompt=ids, temperature=0)
    by_text = post(http, "/v1/completions", model="small", prompt="The total is", temperature=0)
    assert by_ids["choices"] == by_text["choices"] and by_ids["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("temperature", [0, 1])
def test_one_seed_one_answer(http, temperature):
    """Whatever else is under way, and however many at once."""
    alone = generate(http, seed=42, temperature=temperature)
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda _: generate(http, seed=42, temperature=temperature)["output_ids"], range(16)))
    assert many == [alone["output_ids"]] * 16


def test_seeds_differ(http):
    answers = {generate(http, seed=seed, temperature=1)["text"] for seed in range(4)}
    assert len(answers) > 1
    assert generate(http, seed=1)["text"] == generate(http, seed=2)["text"], "greedy answers have no noise"


def test_bias_bans(http):
    free = generate(http)["output_ids"]
    banned = set(free)
    body = generate(http, logit_bias={str(token): -100 for token in banned}, ignore_eos=True)
    assert not banned & set(body["output_ids"])


def test_probabilities_of_tokens(http):
    body = post(http, "/v1/completions", model="small", prompt="The total is", logprobs=10, max_tokens=8, temperature=0)
    logprobs = body["choices"][0]["logprobs"]
    assert [len(tops) for tops in logprobs["top_logprobs"]] == [10] * 8
    assert all(tops[token] == max(tops.values()) for token, tops in zip(logprobs["tokens"], logprobs["top_logprobs"]))


def test_a_cached_prompt_gives_the_same_answer(http):
    fields = {"model": "small", "text": "One two three four five six seven eight " * 3, "cache_salt": "llama.cpp",
              "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
    first, second = post(http, "/generate", **fields), post(http, "/generate", **fields)
    assert first["meta_info"]["cached_tokens"] == 0 < second["meta_info"]["cached_tokens"]
    assert first["output_ids"] == second["output_ids"]


def test_end_tokens_that_do_not_count(http):
    body = generate(http, max_new_tokens=100, ignore_eos=True)
    assert (len(body["output_ids"]), body["meta_info"]["finish_reason"]["type"]) == (100, "length")


def test_requests_that_are_given_up(url):
    """Clients that run out of patience leave nothing behind."""
    body = {"model": "large", "messages": BOOK, "max_tokens": 1900, "ignore_eos": True}
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.2)
    wait_until_idle(url)


# --- Tokens ---

@pytest.mark.parametrize("text", ["What is 47 * 83?", " a  b\n\n", "한글 😀 é", "<|im_start|>user", ""])
def test_tokens_and_back(http, text):
    body = post(http, "/tokenize", model="small", prompt=text, return_token_strs=True)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert post(http, "/detokenize", model="small", tokens=body["tokens"])["prompt"] == text


# --- Keys ---

@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_public_endpoints(guarded, path):
    assert httpx.get(f"{guarded}{path}").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"authorization": "Bearer wrong"}, {"authorization": KEYS[0]}, {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": "Bearer"}, {"x-api-key": "wrong"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/generate", "/metrics", "/tokenize", "/nowhere"]
)
def test_closed_endpoints(guarded, path, headers):
    answer = httpx.post(f"{guarded}{path}", headers=headers, json={})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "www-authenticate" in answer.headers


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEYS[1]}"}, {"x-api-key": KEYS[1]}], ids=list)
def test_open_endpoints(guarded, headers):
    body = {"model": "small", "messages": BOOK, "max_tokens": 2}
    assert httpx.post(f"{guarded}/v1/chat/completions", headers=headers, json=body).status_code == 200


def test_no_cors_unless_asked_for(http):
    answer = http.options("/v1/chat/completions", headers={
        "origin": "https://example.com", "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in answer.headers
