"""What the tests of vLLM's OpenAI server check from outside, asked of this one in our own words.

docs/compatibility.md lists which of their groups apply.
"""

import asyncio
import json
import re

import openai
import pytest

from servers import wait_until_idle

PROMPT = "The total is"
MESSAGES = [
    {"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "Compute 17 * 24."}
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "skills": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
IPV4 = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"


def complete(client, model="small", **fields):
    return client.completions.create(model=model, **({"prompt": PROMPT, "max_tokens": 5, "temperature": 0} | fields))


def chat(client, model="small", **fields):
    return client.chat.completions.create(model=model, **({"messages": MESSAGES, "max_tokens": 10} | fields))


def tokenize(client, **what):
    """Token ids; all demo models have one tokenizer. OpenAI's client sends what it does not know itself, too."""
    return client.post("/tokenize", body={"model": "small"} | what, cast_to=object)["tokens"]


# --- Completions ---

def test_one_completion(client, model):
    answer = complete(client, model)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    (choice,) = answer.choices
    assert len(choice.text) >= 5 and choice.finish_reason == "length" and choice.logprobs is None
    ids = tokenize(client, prompt=PROMPT)
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(ids), "completion_tokens": 5, "total_tokens": 5 + len(ids)
    }
    assert complete(client, model, prompt=ids, seed=1).usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("logprobs", [0, 1, 5, 20])
def test_logprobs_of_completions(client, logprobs):
    choice = complete(client, logprobs=logprobs).choices[0]
    assert [len(part) for part in (choice.logprobs.tokens, choice.logprobs.token_logprobs)] == [5, 5]
    for tops in choice.logprobs.top_logprobs:
        assert max(1, logprobs) <= len(tops) <= logprobs + 1
    assert "".join(choice.logprobs.tokens) == choice.text


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, logprobs=21, stream=stream)
    assert caught.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, logprobs=True, top_logprobs=21, stream=stream)
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo(client, ids, max_tokens):
    """The prompt in front of the answer, its log-probabilities in front of the answer's."""
    tokens = tokenize(client, prompt=PROMPT)
    answer = complete(client, prompt=tokens if ids else PROMPT, echo=True, logprobs=1, max_tokens=max_tokens)
    (choice,) = answer.choices
    alone = complete(client, max_tokens=max_tokens).choices[0].text if max_tokens else ""
    assert choice.text == PROMPT + alone
    lists = choice.logprobs
    assert {len(part) for part in (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)} == {
        len(tokens) + max_tokens
    }
    assert lists.token_logprobs[0] is None and all(value <= 0 for value in lists.token_logprobs[1:])
    for offset, token in zip(lists.text_offset, lists.tokens):
        assert choice.text[offset:].startswith(token)
    assert answer.usage.completion_tokens == max_tokens


def test_echo_in_a_stream(client):
    whole = complete(client, echo=True, logprobs=1)
    choices = [chunk.choices[0] for chunk in complete(client, echo=True, logprobs=1, stream=True)]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    values = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    assert values == whole.choices[0].logprobs.token_logprobs


def test_echo_says_what_the_answer_said(client):
    """Tokens that were written have the same log-probability when they are read as a prompt."""
    written = complete(client, logprobs=0, max_tokens=12, extra_body={"return_token_ids": True}).choices[0]
    tokens = tokenize(client, prompt=PROMPT)
    read = complete(client, prompt=tokens + written.token_ids, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert read.logprobs.token_logprobs[len(tokens):] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)


def test_streamed_completion(client, model):
    whole = complete(client, model, seed=0)
    chunks = list(complete(client, model, stream=True, seed=0))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons.count("length") == 1 and reasons[-1] == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_parallel_streams(client):
    """Chunks of several choices are mixed; each ends once."""
    whole = complete(client, n=3, max_tokens=10, temperature=1, seed=3)
    texts, ends = {}, []
    for chunk in complete(client, n=3, max_tokens=10, temperature=1, seed=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == [0, 1, 2]
    assert texts == {choice.index: choice.text for choice in whole.choices}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_usage_of_streams(client, kind, asked):
    ask = chat if kind == "chat" else complete
    chunks = list(ask(client, stream=True, stream_options={"include_usage": asked}, temperature=0))
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == asked
    if asked:
        whole = ask(client, temperature=0).usage
        assert chunks[-1].choices == [] and usages[0].completion_tokens == whole.completion_tokens


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}], ids=str)
def test_options_of_streams_without_a_stream(client, options):
    for ask in (chat, complete):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, stream_options=options)
        assert caught.value.param == "stream_options"


def test_batches(client):
    """Several prompts, several choices of each, in a stream and in one piece."""
    answer = complete(client, prompt=[PROMPT] * 2, n=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 1
    texts = [""] * 2
    for chunk in complete(client, prompt=[PROMPT] * 2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [answer.choices[0].text] * 2


@pytest.mark.parametrize("token", [285, 1646])
def test_bias(client, token):
    fields = {"max_tokens": 4, "extra_body": {"return_token_ids": True}}
    forced = complete(client, logit_bias={str(token): 100}, **fields).choices[0].token_ids
    assert forced == [token] * 4
    free = complete(client, **fields).choices[0].token_ids
    banned = complete(client, logit_bias={str(id): -100 for id in free}, **fields).choices[0].token_ids
    assert not set(free) & set(banned)


@pytest.mark.parametrize("ids", [["2048"], ["-1"], ["1", "99999"], ["x"]], ids=str)
def test_biases_outside_of_the_vocabulary(client, ids):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, logit_bias={id: 1 for id in ids})
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("prompt", [[], "", [[]], [[], [1]], [2048], [-1], [[1, 99999]], [1.5], [None], {}], ids=str)
def test_prompts_that_are_none(http, prompt):
    answer = http.post("/v1/completions", json={"model": "small", "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("body", ["[]", '["x"]', '"x"', "5", "true", "null"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/generate"])
def test_bodies_that_are_no_objects(http, path, body):
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


# --- Tokens ---

def test_tokens_in_and_out(client):
    """A prompt of ids, ids of the answer: the text between them is the same."""
    answer = chat(client, temperature=0, extra_body={"return_token_ids": True})
    ids = tokenize(client, messages=MESSAGES)
    assert answer.prompt_token_ids == ids
    again = complete(client, prompt=ids, max_tokens=10, extra_body={"return_token_ids": True})
    assert again.choices[0].token_ids == answer.choices[0].token_ids
    assert again.choices[0].text == answer.choices[0].message.content
    back = client.post("/detokenize", body={"model": "small", "tokens": ids}, cast_to=object)["prompt"]
    assert back.startswith("<|im_start|>system\nyou are")


def test_tokens_named_by_their_ids(client):
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(client, logprobs=1, extra_body=fields).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{id}" for id in choice.token_ids]
    choice = chat(client, logprobs=True, extra_body=fields, temperature=0).choices[0]
    assert [token.token for token in choice.logprobs.content] == [f"token_id:{id}" for id in choice.token_ids]


@pytest.mark.parametrize("keep", [2, -1])
def test_prompts_that_are_cut(client, keep):
    answer = complete(client, prompt="one two three " * 1000, extra_body={"truncate_prompt_tokens": keep})
    assert answer.usage.prompt_tokens == (2 if keep == 2 else 2048 - 5)


def test_prompt_logprobs(client):
    answer = complete(client, extra_body={"prompt_logprobs": 2, "return_token_ids": True})
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None and len(rest) == answer.usage.prompt_tokens - 1
    for id, tops in zip(answer.choices[0].prompt_token_ids[1:], rest):
        assert str(id) in tops and 2 <= len(tops) <= 3
        assert {1, 2} <= {top["rank"] for top in tops.values()}


# --- Forms ---

@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize(
    ("form", "holds"),
    [
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "age", "skills"}),
        ({"json": json.dumps(SCHEMA)}, lambda text: set(json.loads(text)) == {"name", "age", "skills"}),
        ({"regex": IPV4}, lambda text: re.fullmatch(IPV4, text)),
        ({"choice": ["Python", "Java", "C++"]}, lambda text: text in ("Python", "Java", "C++")),
        ({"grammar": 'start: "SELECT " col " from " tab\ncol: "a" | "b"\ntab: "t" | "u"'},
         lambda text: re.fullmatch("SELECT [ab] from [tu]", text)),
    ],
    ids=["json", "json text", "regex", "choice", "grammar"],
)
def test_structured_outputs(client, kind, form, holds):
    """At a route: a hand-off may come anywhere in the form."""
    fields = {"max_tokens": 200, "temperature": 1, "seed": 1, "n": 2, "extra_body": {"structured_outputs": form}}
    if kind == "chat":
        choices = chat(client, "rstitch", **fields).choices
        texts = [choice.message.content for choice in choices]
    else:
        choices = complete(client, "rstitch", **fields).choices
        texts = [choice.text for choice in choices]
    for choice, text in zip(choices, texts):
        assert choice.finish_reason == "stop" and holds(text), text


@pytest.mark.parametrize(
    "form", [{"regex": {"x": 1}}, {"regex": "("}, {"json": 42}, {"choice": "x"}, {"json": {}, "regex": "a"}],
    ids=str,
)
def test_structured_outputs_that_are_none(client, form):
    for ask in (chat, complete):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, extra_body={"structured_outputs": form})
        assert caught.value.param.startswith("structured_outputs")


def test_logprobs_of_structured_outputs(client):
    form = {"structured_outputs": {"choice": ["Python", "Java"]}}
    answer = chat(client, logprobs=True, top_logprobs=5, extra_body=form)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(token.logprob <= 0 and len(token.top_logprobs) in (5, 6) for token in content)


# --- Chats ---

@pytest.mark.parametrize("top", [None, 0, 5])
def test_logprobs_of_chats(client, top):
    fields = {"logprobs": top is not None} | ({"top_logprobs": top} if top else {})
    logprobs = chat(client, **fields).choices[0].logprobs
    assert (logprobs is None) == (top is None)
    if logprobs:
        assert {len(token.top_logprobs) for token in logprobs.content} <= ({5, 6} if top else {0, 1})


def test_a_conversation(client):
    first = chat(client, "large", max_tokens=100, temperature=0)
    messages = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "and in json?"}]
    second = chat(client, "large", messages=messages, temperature=0)
    assert second.choices[0].message.role == "assistant" and second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_fields_that_nobody_knows(client):
    """In a request, and in a message: taken, and without effect."""
    plain = chat(client, temperature=0).choices[0].message.content
    messages = [MESSAGES[0], MESSAGES[1] | {"extra_field": "0"}]
    assert chat(client, temperature=0, messages=messages).choices[0].message.content == plain
    assert chat(client, temperature=0, extra_body={"extra_field": [0]}).choices[0].message.content == plain


def test_content_in_parts(client):
    parts = [{"type": "text", "text": MESSAGES[1]["content"]}]
    in_parts = chat(client, temperature=0, messages=[MESSAGES[0], {"role": "user", "content": parts}])
    assert in_parts.choices[0].message.content == chat(client, temperature=0).choices[0].message.content


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_longest_seeds(client, seed):
    texts = {chat(client, seed=seed, temperature=1).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_seeds_that_are_too_long(client, seed):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, seed=seed)
    assert caught.value.param == "seed"


@pytest.mark.parametrize("ids", [[2048], [-1], [0, 99999]], ids=str)
def test_stop_tokens_outside_of_the_vocabulary(client, ids):
    for ask in (chat, complete):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, extra_body={"stop_token_ids": ids})
        assert caught.value.param == "stop_token_ids"


def test_stop_tokens(client):
    fields = {"max_tokens": 12, "temperature": 0}
    ids = chat(client, extra_body={"return_token_ids": True}, **fields).choices[0].token_ids
    choice = chat(client, extra_body={"stop_token_ids": [ids[3]]}, **fields).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[3])


def test_no_model(http):
    """With several models and routes one must be named, as the message says."""
    for path, fields in [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": PROMPT})]:
        error = http.post(path, json=fields).json()["error"]
        assert error["param"] == "model" and "rstitch" in error["message"]


# --- The rest ---

def test_version_and_load(http):
    assert re.match(r"\d+\.\d+\.\d+", http.get("/version").json()["version"])
    assert isinstance(http.get("/load").json()["server_load"], int)
    assert http.get("/health").status_code == http.get("/ping").status_code == 200


def test_models(client):
    models = {model.id: model for model in client.models.list()}
    assert models["small"].max_model_len == 2048 and models["small"].owned_by == "tokenrouter"
    assert models["small"].root == "small"


def test_content_types(http):
    """Anything but JSON is refused by its type, as one may send it from a page of another origin."""
    body = json.dumps({"model": "small", "prompt": PROMPT, "max_tokens": 1})
    for kind, status in [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415), ("multipart/form-data", 415),
    ]:
        answer = http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == status, kind


def test_many_that_are_cancelled(url, client):
    """More requests than are computed at once, all cancelled by their client; then another one is answered."""
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as many:
            fields = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
            tasks = [asyncio.create_task(chat(many, **fields)) for _ in range(40)]
            await asyncio.wait(tasks, timeout=1)
            for task in tasks:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled = [isinstance(result, asyncio.CancelledError) for result in asyncio.run(ask())]
    assert any(cancelled)
    assert chat(client).choices[0].message.content
    wait_until_idle(url)
