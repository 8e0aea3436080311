"""Simon Willison's `llm` against the server: a program that is configured by a file."""

import json
import sys

import pytest

from servers import run

CONFIG = """\
- model_id: demo
  model_name: rstitch
  api_base: {url}/v1
  supports_schema: true
- model_id: demo-text
  model_name: small
  api_base: {url}/v1
  completion: true
"""
OPTIONS = ["-o", "temperature", "0", "-o", "max_tokens", "48"]


@pytest.fixture(scope="module")
def llm(url, tmp_path_factory):
    home = tmp_path_factory.mktemp("llm")
    (home / "extra-openai-models.yaml").write_text(CONFIG.format(url=url))

    def ask(*arguments):
        return run([sys.executable, "-m", "llm", *arguments], LLM_USER_PATH=str(home), OPENAI_API_KEY="none")

    return ask


@pytest.fixture(scope="module")
def text(client):
    answer = client.chat.completions.create(
        model="rstitch", messages=[{"role": "user", "content": "What is 47 * 83?"}], max_tokens=48, temperature=0
    )
    return answer.choices[0].message.content


def test_models(llm):
    assert "demo" in llm("models", "list")


@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--async"]], ids=["stream", "whole", "async"])
def test_prompt(llm, text, flags):
    assert llm("-m", "demo", *flags, *OPTIONS, "What is 47 * 83?").strip() == text.strip()


def test_completion_model(llm, client):
    whole = client.completions.create(model="small", prompt="The total is", max_tokens=48, temperature=0)
    assert llm("-m", "demo-text", *OPTIONS, "The total is").strip() == whole.choices[0].text.strip()


def test_usage_is_in_the_log(llm, client):
    llm("-m", "demo", *OPTIONS, "Compute 17 * 24.")
    entry = json.loads(llm("logs", "list", "-n", "1", "--json"))[0]
    whole = client.chat.completions.create(
        model="rstitch", messages=[{"role": "user", "content": "Compute 17 * 24."}], max_tokens=48, temperature=0
    )
    assert (entry["input_tokens"], entry["output_tokens"]) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_schema(llm):
    answer = json.loads(llm("-m", "demo", "-o", "max_tokens", "400", "--schema", "number int, sure bool", "What is 47 * 83?"))
    assert isinstance(answer["number"], int) and isinstance(answer["sure"], bool)
