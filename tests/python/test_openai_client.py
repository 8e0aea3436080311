"""OpenAI's own client against the server."""

import openai
import pytest

QUESTION = "A set has 23 stamps for 30 dollars each. Albert orders 8 sets. What is the price?"
MESSAGES = [{"role": "user", "content": QUESTION}]
KOREAN = [{"role": "user", "content": "서울에 사과가 47개 있어요. 😀 몇 개예요?"}]


def chat(client, model, **fields):
    return client.chat.completions.create(model=model, **({"messages": MESSAGES, "max_tokens": 48} | fields))


def streamed(client, model, **fields):
    """Text of each choice, finish reasons by choice, and the usage."""
    texts, finishes, usage = {}, {}, None
    for chunk in chat(client, model, stream=True, stream_options={"include_usage": True}, **fields):
        if chunk.usage is not None:
            usage = chunk.usage
            assert chunk.choices == []
        for choice in chunk.choices:
            assert choice.index not in finishes, "nothing comes after the end"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, usage


def test_models(client):
    ids = [model.id for model in client.models.list()]
    assert {"small", "large", "rstitch"} <= set(ids)
    for name in ids:
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_chat(client, model):
    answer = chat(client, model)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == model
    assert choice.message.role == "assistant" and choice.message.content
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert sum(usage.tokens_by_model.values()) == usage.completion_tokens
    assert choice.finish_reason == ("length" if usage.completion_tokens == 48 else "stop")


def test_settings_of_a_request(client):
    def writers(**settings):
        usage = chat(client, "rstitch", seed=1, extra_body={"routing": {"settings": settings}}).usage
        return {model for model, tokens in usage.tokens_by_model.items() if tokens}

    assert writers(threshold=1) == {"small"}
    assert "large" in writers(threshold=0)
    assert client.models.retrieve("rstitch").overrides == ["threshold"]
    for settings, param in [({"threshold": 2}, "routing.settings"), ({"router": "x"}, "routing.settings.router")]:
        with pytest.raises(openai.BadRequestError) as refused:
            writers(**settings)
        assert refused.value.param == param


def test_cached_tokens(client, model):
    # With its own salt the first request finds nothing, whatever other tests have asked.
    fields = {"seed": 1, "extra_body": {"cache_salt": f"test_cached_tokens {model}"}}
    cold, warm = (chat(client, model, **fields) for _ in range(2))
    _, _, streamed_usage = streamed(client, model, **fields)
    assert warm.choices[0].message.content == cold.choices[0].message.content
    whole_pages = (cold.usage.prompt_tokens - 1) // 16 * 16
    cached = [usage.prompt_tokens_details.cached_tokens for usage in (cold.usage, warm.usage, streamed_usage)]
    assert whole_pages > 0 and cached == [0, whole_pages, whole_pages]


def test_demo_models_are_greedy_by_default(client, model):
    if model == "me":
        pytest.skip("this policy draws a model for each token")
    assert chat(client, model).choices[0].message.content == chat(client, model).choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": KOREAN},
        {"temperature": 1.5, "n": 3},
        {"stop": ["\n", "is"]},
        {"max_tokens": 1},
        {"temperature": 1, "logprobs": True, "top_logprobs": 3},
        {"max_tokens": 400},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_streams_say_what_whole_answers_say(client, model, fields):
    fields = {"seed": 7} | fields
    whole = chat(client, model, **fields)
    texts, finishes, usage = streamed(client, model, **fields)
    for choice in whole.choices:
        assert texts[choice.index].encode() == choice.message.content.encode()
        assert finishes[choice.index] == choice.finish_reason
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.tokens_by_model == whole.usage.tokens_by_model


def dictated(text, byte_tokens):
    """Fields that make a model write the bytes of `text`, one token each.

    The bias orders the bytes; the penalty puts each out of the running once it was written.
    """
    data = text.encode()
    assert len(set(data)) == len(data) <= 4, "each byte can come once"
    bias = {str(byte_tokens[b]): 100 - 20 * place for place, b in enumerate(data)}
    penalty = {"repetition_penalty": 100, "ignore_eos": True}
    return {"logit_bias": bias, "temperature": 0, "max_tokens": len(data), "extra_body": penalty}


@pytest.mark.parametrize("text", ["😀", "한", "é", "한x"])
def test_characters_spread_over_tokens(client, model, byte_tokens, text):
    fields = dictated(text, byte_tokens)
    whole = chat(client, model, **fields)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == len(text.encode())
    chunks = list(chat(client, model, stream=True, **fields))
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(deltas) == text
    assert deltas[0] == text[0], "a character comes in one piece"

    fields["max_tokens"] = len(text[0].encode()) - 1
    assert chat(client, model, **fields).choices[0].message.content == "\ufffd"
    assert streamed(client, model, **fields)[0][0] == "\ufffd"


def test_random_bytes(client, model, byte_tokens):
    """Bytes of some characters in any order: most are broken, and streams break them alike."""
    for seed in range(4):
        bias = {str(byte_tokens[b]): 100 for b in "ď😀한".encode()}
        fields = {"logit_bias": bias, "temperature": 2, "seed": seed, "extra_body": {"ignore_eos": True}}
        whole = chat(client, model, **fields).choices[0].message.content
        assert any(ord(c) > 127 for c in whole), whole
        assert streamed(client, model, **fields)[0][0].encode() == whole.encode()


def test_several_choices(client, model):
    answer = chat(client, model, n=4, temperature=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1
    again = chat(client, model, n=4, temperature=2, seed=1)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    alone = chat(client, model, temperature=2, seed=1)
    assert alone.choices[0].message.content == answer.choices[0].message.content


def test_no_seed_means_a_random_one(client):
    texts = {chat(client, "small", temperature=2).choices[0].message.content for _ in range(3)}
    assert len(texts) > 1


def test_logprobs(client, model):
    answer = chat(client, model, logprobs=True, top_logprobs=3, temperature=0)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    shown = content[:-1] if answer.choices[0].finish_reason == "stop" else content
    assert b"".join(bytes(t.bytes) for t in shown).decode() == answer.choices[0].message.content
    for token in content:
        assert token.logprob <= 0
        assert token.token in [top.token for top in token.top_logprobs]
        if model in ("small", "large"):
            assert token.top_logprobs[0].token == token.token, "greedy takes the best"


def test_stop(client, model):
    whole = chat(client, model, seed=3).choices[0].message.content
    stop = whole[5:9]
    choice = chat(client, model, seed=3, stop=stop).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    kept = chat(client, model, seed=3, stop=[stop], extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.message.content == whole[: whole.index(stop) + len(stop)]


def test_routing(client):
    answer = chat(client, "rstitch", max_tokens=200, extra_body={"return_routing": True})
    choice = answer.choices[0]
    assert "".join(entry["text"] for entry in choice.routing) == choice.message.content
    counts = {}
    for entry in choice.routing:
        counts[entry["model"]] = counts.get(entry["model"], 0) + 1
    assert counts == answer.usage.tokens_by_model
    assert set(counts) == {"small", "large"} and answer.usage.handoffs > 0
    assert any(entry["signals"] for entry in choice.routing)

    routed, text = [], ""
    for chunk in chat(client, "rstitch", max_tokens=200, stream=True, extra_body={"return_routing": True}):
        for part in chunk.choices:
            text += part.delta.content or ""
            routed += getattr(part, "routing", None) or []
    assert text == choice.message.content
    assert routed == choice.routing


def test_completions(client, model):
    fields = {"model": model, "max_tokens": 8, "temperature": 0, "seed": 5}
    whole = client.completions.create(prompt="The total is", logprobs=2, **fields)
    logprobs = whole.choices[0].logprobs
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs), len(logprobs.text_offset)}
    assert lengths == {whole.usage.completion_tokens}
    text = whole.choices[0].text
    assert "".join(c.choices[0].text for c in client.completions.create(prompt="The total is", stream=True, **fields)) == text
    batch = client.completions.create(prompt=["The total is", "The total is"], **fields)
    assert [c.text for c in batch.choices] == [text, text]
    ids = client.completions.create(prompt=[[285, 449, 297]], **fields)
    assert ids.choices[0].text == text and ids.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.NotFoundError, {"model": "none"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"top_p": 2}),
        (openai.BadRequestError, {"n": 0}),
        (openai.BadRequestError, {"n": 10**9}),
        (openai.BadRequestError, {"stop": ""}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (openai.BadRequestError, {"logit_bias": {"99999": 1}}),
        (openai.BadRequestError, {"extra_body": {"stop_token_ids": [99999]}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, error, fields, stream):
    with pytest.raises(error) as caught:
        chat(client, **({"model": "small", "stream": stream} | fields))
    assert isinstance(caught.value.code, str)
    if "extra_body" not in fields:
        assert caught.value.param == next(iter(fields))
    assert caught.value.request_id


def test_too_long(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "small", messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in caught.value.message


@pytest.fixture
def written(client):
    """Ids of a prompt and of the greedy answer of a model alone, with the answer's log-probabilities."""
    fields = {"logprobs": 1, "temperature": 0, "extra_body": {"return_token_ids": True}}
    answer = client.completions.create(model="small", prompt="23 stamps for 30 dollars", max_tokens=24, **fields)
    choice = answer.choices[0]
    return choice.prompt_token_ids, choice.token_ids, choice.logprobs.token_logprobs


def test_an_echo_tells_how_likely_a_text_is(client, written):
    # What lm-evaluation-harness does: the prompt with its continuation is sent, and the continuation's part read.
    prompt, answer, expected = written
    for max_tokens in (0, 1):
        fields = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": max_tokens}
        texts = [prompt + answer, prompt + answer[:-2]]
        choices = client.completions.create(model="small", prompt=texts, **fields).choices
        for ids, choice in zip(texts, choices):
            logprobs = choice.logprobs
            assert len(logprobs.token_logprobs) == len(ids) + max_tokens
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            end = len(ids)
            scored = logprobs.token_logprobs[len(prompt) : end]
            assert scored == pytest.approx(expected[: len(scored)], abs=1e-3)
            tops = logprobs.top_logprobs[len(prompt) : end]
            assert all(value == max(top.values()) for value, top in zip(scored, tops)), "greedy"
            assert logprobs.text_offset == sorted(logprobs.text_offset)
    changed = prompt + answer[:3] + [answer[3] ^ 1] + answer[4:]
    other = client.completions.create(model="small", prompt=changed, **fields).choices[0].logprobs
    place = len(prompt) + 3
    assert other.token_logprobs[place] < max(other.top_logprobs[place].values()), "not greedy"
    assert other.token_logprobs[len(prompt) : place] == pytest.approx(expected[:3], abs=1e-3)


def test_prompt_logprobs_say_the_same(client, http, written):
    prompt, answer, expected = written
    ids = prompt + answer
    fields = {"max_tokens": 1, "extra_body": {"prompt_logprobs": 1}}
    told = client.completions.create(model="small", prompt=ids, **fields).choices[0].prompt_logprobs
    assert told[0] is None and len(told) == len(ids)
    scored = [entry[str(token)] for entry, token in zip(told[1:], ids[1:])]
    assert [entry["logprob"] for entry in scored[len(prompt) - 1 :]] == pytest.approx(expected, abs=1e-3)
    assert all(entry["rank"] == 1 for entry in scored[len(prompt) - 1 :]), "greedy"
    body = {"model": "small", "input_ids": ids, "return_logprob": True, "logprob_start_len": len(prompt) - 1}
    meta = http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 0}}).json()["meta_info"]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-3)


def test_an_echo_begins_with_the_text_as_it_was_sent(client, model):
    text = "서울 😀 ﬁne"
    answer = client.completions.create(model=model, prompt=text, echo=True, logprobs=0, max_tokens=4)
    choice = answer.choices[0]
    assert choice.text.startswith(text)
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    parts = client.completions.create(model=model, prompt=text, echo=True, logprobs=0, max_tokens=4, stream=True)
    assert "".join(part.choices[0].text for part in parts if part.choices).startswith(text)
