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


@pytest.mark.parametrize("flags", [[], ["--async"]], ids=["stream", "async"])
def test_prompt(llm, text, flags):
    assert llm("-m", "demo", *flags, *OPTIONS, "What is 47 * 83?").strip() == text.strip()


def test_completion_model(llm, client):
    whole = client.completions.create(model="small", prompt="The total is", max_tokens=48, temperature=0)
    assert llm("-m", "demo-text", *OPTIONS, "The total is").strip() == whole.choices[0].text.strip()


def test_whole_answer_and_its_usage(llm, client):
    text = llm("-m", "demo", "--no-stream", *OPTIONS, "Compute 17 * 24.")
    entry = json.loads(llm("logs", "list", "-n", "1", "--json"))[0]
    whole = client.chat.completions.create(
        model="rstitch", messages=[{"role": "user", "content": "Compute 17 * 24."}], max_tokens=48, temperature=0
    )
    assert text.strip() == whole.choices[0].message.content.strip()
    assert (entry["input_tokens"], entry["output_tokens"]) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_schema(llm):
    number = {"type": "integer", "minimum": 0, "maximum": 9999}
    schema = {
        "type": "object", "properties": {"number": number, "sure": {"type": "boolean"}},
        "required": ["number", "sure"], "additionalProperties": False,
    }
    options = ["-o", "max_tokens", "200", "--schema", json.dumps(schema)]
    answer = json.loads(llm("-m", "demo", *options, "What is 47 * 83?"))
    assert set(answer) == {"number", "sure"} and isinstance(answer["sure"], bool)
