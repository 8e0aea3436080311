"""The parts of OpenAI's client around a plain request: async, helpers for streams, raw responses, retries, errors."""

import asyncio
from enum import Enum
from typing import Annotated

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from servers import KEYS, ROOM, occupied

MESSAGES = [{"role": "user", "content": "What is 47 * 83?"}]
ASK = {"model": "rstitch", "messages": MESSAGES, "max_tokens": 48, "temperature": 0}


class Kind(str, Enum):
    SUM = "sum"
    PRODUCT = "product"


class Problem(BaseModel):
    """Bounded everywhere: these models do not come to an end by themselves."""

    kind: Kind
    numbers: list[Annotated[int, Field(ge=0, le=999)]] = Field(max_length=3)
    exact: bool


def guest(address, key=KEYS[0], **options):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, **({"max_retries": 0} | options))


def test_async(url, client):
    """Requests of one async client, answered and streamed at once."""
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as many:
            async def streamed():
                stream = await many.chat.completions.create(stream=True, **ASK)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async def whole():
                return (await many.chat.completions.create(**ASK)).choices[0].message.content

            ids = [model.id async for model in many.models.list()]
            return ids, await asyncio.gather(streamed(), whole(), streamed(), whole())

    ids, texts = asyncio.run(ask())
    assert "rstitch" in ids
    assert texts == [client.chat.completions.create(**ASK).choices[0].message.content] * 4


def test_a_stream_that_is_left(client):
    """Leaving the block closes the connection; the client goes on with others."""
    with client.chat.completions.create(stream=True, **ASK) as stream:
        first = next(iter(stream))
    assert first.choices[0].delta.role == "assistant"
    assert client.chat.completions.create(**ASK).choices[0].finish_reason == "stop"


def test_stream_helper(client):
    whole = client.chat.completions.create(logprobs=True, **ASK)
    with client.chat.completions.stream(logprobs=True, stream_options={"include_usage": True}, **ASK) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "content.delta"]
    assert "".join(event.delta for event in deltas) == whole.choices[0].message.content
    assert deltas[-1].snapshot == whole.choices[0].message.content
    assert [event.content for event in events if event.type == "content.done"] == [whole.choices[0].message.content]
    assert [len(event.content) for event in events if event.type == "logprobs.content.done"] == [
        whole.usage.completion_tokens
    ]
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


def test_raw_responses(client):
    raw = client.chat.completions.with_raw_response.create(**ASK, extra_headers={"x-request-id": "mine"})
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert raw.headers["x-request-id"] == raw.request_id == "mine"
    assert raw.retries_taken == 0
    whole = raw.parse()
    assert whole._request_id == "mine" and whole.choices[0].message.content
    with client.chat.completions.with_streaming_response.create(stream=True, **ASK) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_options_of_the_client(client):
    """What a client adds to requests without being asked changes nothing."""
    other = client.with_options(
        timeout=120, default_headers={"openai-beta": "x"}, default_query={"api-version": "2026-01-01"}
    )
    assert other.chat.completions.create(**ASK).choices == client.chat.completions.create(**ASK).choices


def test_errors_in_streams_are_exceptions(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(stream=True, **(ASK | {"messages": [{"role": "user", "content": "a " * 5000}]}))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.type == "invalid_request_error"


def test_unknown_endpoints(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="small", input="x")
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("key", ["wrong", KEYS[0][:-1], KEYS[0] + "x", KEYS[0].upper()])
def test_wrong_keys(guarded, key):
    for ask in [lambda c: c.models.list(), lambda c: c.chat.completions.create(stream=True, **ASK)]:
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(guest(guarded, key))
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        assert key not in caught.value.message


def test_right_keys(guarded):
    for key in KEYS:
        assert guest(guarded, key).chat.completions.create(**ASK).choices[0].message.content


def test_no_room(guarded):
    """503 for all where the server is full, 429 for a client that has its share; both say when to come again."""
    with occupied(guarded, ROOM, KEYS[0]):
        for key, error, code in [
            (KEYS[0], openai.RateLimitError, "rate_limit_exceeded"),
            (KEYS[1], openai.InternalServerError, "server_overloaded"),
        ]:
            with pytest.raises(error) as caught:
                guest(guarded, key).chat.completions.create(**ASK)
            assert caught.value.code == code
            assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.status_code == 503


@pytest.mark.parametrize("key", KEYS)
def test_retries(guarded, key):
    """The client's own retries get an answer once there is room."""
    refused = []
    with occupied(guarded, ROOM, KEYS[0]) as leave:
        def note(response):
            if response.status_code != 200:
                refused.append(response.status_code)
                leave()

        with httpx.Client(event_hooks={"response": [note]}, timeout=120) as watched:
            patient = guest(guarded, key, max_retries=20, http_client=watched)
            raw = patient.chat.completions.with_raw_response.create(**ASK)
    assert raw.retries_taken == len(refused) > 0
    assert set(refused) == {429 if key == KEYS[0] else 503}
    assert raw.parse().choices[0].message.content


def test_mistakes_are_not_retried(url):
    """A client that retries asks once where it is itself wrong."""
    asked = []
    with httpx.Client(event_hooks={"response": [lambda response: asked.append(response.status_code)]}) as watched:
        with pytest.raises(openai.BadRequestError):
            guest(url, max_retries=5, http_client=watched).chat.completions.create(**(ASK | {"temperature": 3}))
    assert asked == [400]


@pytest.mark.parametrize("model", ["small", "rstitch"])
def test_parse(client, model):
    """A pydantic class goes out as a schema and comes back as an object."""
    answer = client.chat.completions.parse(**(ASK | {"model": model, "max_tokens": 400}), response_format=Problem)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Problem)
    with client.chat.completions.stream(
        **(ASK | {"model": model, "max_tokens": 400}), response_format=Problem
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_parse_of_a_cut_answer(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**(ASK | {"max_tokens": 2}), response_format=Problem)
