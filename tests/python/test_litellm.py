"""litellm against the server: answers, streams, and which of its exceptions each refusal becomes."""

import asyncio
import json

import litellm
import pytest

from servers import KEYS, ROOM, occupied

MESSAGES = [{"role": "user", "content": "What is 47 * 83?"}]


def options(url, key="none", **fields):
    """litellm takes OpenAI's way for a model behind `openai/`."""
    return {
        "model": "openai/rstitch", "api_base": f"{url}/v1", "api_key": key, "messages": MESSAGES,
        "max_tokens": 48, "temperature": 0, "num_retries": 0, "max_retries": 0,
    } | fields


@pytest.fixture(scope="module")
def text(client):
    answer = client.chat.completions.create(model="rstitch", messages=MESSAGES, max_tokens=48, temperature=0)
    return answer.choices[0].message.content


def test_completion(url, text):
    answer = litellm.completion(**options(url))
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream(url, text):
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **options(url)))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    whole = litellm.completion(**options(url))
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_async(url, text):
    async def ask():
        stream = await litellm.acompletion(stream=True, **options(url))
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        wholes = await asyncio.gather(*(litellm.acompletion(**options(url)) for _ in range(3)))
        return [streamed, *(whole.choices[0].message.content for whole in wholes)]

    assert asyncio.run(ask()) == [text] * 4


def test_text_completion(url, client):
    fields = {"prompt": "The total is", "max_tokens": 8, "temperature": 0}
    answer = litellm.text_completion(
        model="text-completion-openai/small", api_base=f"{url}/v1", api_key="none", max_retries=0, **fields
    )
    assert answer.choices[0].text == client.completions.create(model="small", **fields).choices[0].text


def test_logprobs(url):
    answer = litellm.completion(logprobs=True, top_logprobs=2, **options(url))
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) in (2, 3) for token in content)


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 5000}]}),
        (litellm.BadRequestError, {"top_p": 2}),
        (litellm.BadRequestError, {"messages": [{"role": "nobody", "content": "x"}]}),
        (litellm.NotFoundError, {"model": "openai/none"}),
    ],
    ids=["too long", "top_p", "role", "model"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(url, error, fields, stream):
    with pytest.raises(error) as caught:
        litellm.completion(**options(url, stream=stream, **fields))
    # Not a subclass by accident: a context that is exceeded is a bad request, too.
    assert type(caught.value) is error


def test_wrong_key(guarded):
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**options(guarded, key="wrong"))
    assert litellm.completion(**options(guarded, key=KEYS[0])).choices[0].message.content


def test_no_room(guarded):
    with occupied(guarded, ROOM, KEYS[0]):
        with pytest.raises(litellm.RateLimitError):
            litellm.completion(**options(guarded, key=KEYS[0]))
        with pytest.raises(litellm.ServiceUnavailableError):
            litellm.completion(**options(guarded, key=KEYS[1]))


def test_schema(url):
    schema = {
        "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = litellm.completion(**options(url, response_format=form, max_tokens=200))
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content)["answer"], int)
