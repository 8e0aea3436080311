"""langchain-openai against the server."""

import asyncio

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field, SecretStr

QUESTION = "What is 47 * 83?"


class Answer(BaseModel):
    number: int = Field(ge=0, le=9999)
    sure: bool


def chat(url, **fields):
    options = {"model": "rstitch", "max_tokens": 48, "temperature": 0, "max_retries": 0, "timeout": 120} | fields
    return ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr("none"), **options)


@pytest.fixture(scope="module")
def text(client):
    answer = client.chat.completions.create(
        model="rstitch", messages=[{"role": "user", "content": QUESTION}], max_tokens=48, temperature=0
    )
    return answer.choices[0].message.content


def test_invoke(url, text):
    answer = chat(url).invoke(QUESTION)
    assert answer.content == text
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[key] for key in ("input_tokens", "output_tokens")
    )
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "rstitch"


def test_stream(url, text):
    whole = chat(url).invoke(QUESTION)
    chunks = list(chat(url, stream_usage=True).stream(QUESTION))
    assert len(chunks) > 2
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == text
    assert total.usage_metadata == whole.usage_metadata


def test_async(url, text):
    async def ask():
        answer = await chat(url).ainvoke(QUESTION)
        return answer.content, "".join([chunk.content async for chunk in chat(url).astream(QUESTION)])

    assert asyncio.run(ask()) == (text, text)


def test_batch(url, text):
    questions = [QUESTION, "Compute 17 * 24.", QUESTION]
    answers = [answer.content for answer in chat(url).batch(questions)]
    assert answers == [chat(url).invoke(question).content for question in questions]
    assert answers[0] == answers[2] == text


def test_conversation(url):
    """Messages of all kinds, through a template of the client's."""
    prompt = ChatPromptTemplate.from_messages(
        [SystemMessage("Answer in numbers."), HumanMessage("What is 1 + 1?"), AIMessage("2"), ("human", "{question}")]
    )
    long, short = (prompt | chat(url)).invoke({"question": QUESTION}), chat(url).invoke(QUESTION)
    assert long.content and long.usage_metadata["input_tokens"] > short.usage_metadata["input_tokens"]


def test_completions(url, client):
    llm = OpenAI(
        base_url=f"{url}/v1", api_key=SecretStr("none"), model="small", max_tokens=8, temperature=0, max_retries=0
    )
    whole = client.completions.create(model="small", prompt="The total is", max_tokens=8, temperature=0)
    assert llm.invoke("The total is") == whole.choices[0].text
    assert "".join(llm.stream("The total is")) == whole.choices[0].text


def test_structured_output(url):
    answer = chat(url, max_tokens=400).with_structured_output(Answer, method="json_schema").invoke(QUESTION)
    assert isinstance(answer, Answer)
