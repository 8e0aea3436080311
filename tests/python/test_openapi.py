"""Requests made from the served OpenAPI document. Whatever fits it, or just fails to, has an answer that fits it.

TOKENROUTER_OPENAPI_EXAMPLES is how many requests are made for each endpoint (default: 4), half of them wrong.
"""

import collections
import json
import os

import hypothesis
import jsonschema_rs
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = int(os.environ.get("TOKENROUTER_OPENAPI_EXAMPLES", "4"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MODELS = ["small", "rstitch", "verify"]
MOST_TOKENS = 4


@pytest.fixture(scope="session")
def document(url):
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def bounded(body, limit="max_tokens"):
    """Answers are short: it is not the models that are tested. Most requests are for models that there are."""
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and body["model"] or body.get("model") is None:
        body["model"] = MODELS[len(body.get("model") or "") % len(MODELS)]
    for name in {limit, "max_tokens", "max_completion_tokens", "max_new_tokens"} & {limit, *body}:
        value = body.get(name)
        if value is None or isinstance(value, int) and value > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if isinstance(body.get("n"), int) and body["n"] > 2:
        body["n"] = 2


def prepare(path, body):
    if path not in ("/generate", "/v1/completions", "/v1/chat/completions"):
        return
    bounded(body)
    if path == "/generate" and isinstance(body, dict):
        body.pop("max_tokens", None)
        if body.get("text") is None and body.get("input_ids") is None:
            body["text"] = "Hi"
        if body.get("sampling_params") is None:
            body["sampling_params"] = {}
        params = body["sampling_params"]
        for one in params if isinstance(params, list) else [params]:
            if isinstance(one, dict):
                bounded(one, "max_new_tokens")
                one.pop("model", None)


def check_events(document, operation, text):
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    data = [json.loads(event.removeprefix("data: ")) for event in events[:-2] if event.startswith("data: ")]
    answer = operation.definition.raw["responses"]["200"]["content"]["text/event-stream"]
    schema = {"type": "array", "items": answer["x-event-schema"], "components": document.raw_schema["components"]}
    jsonschema_rs.validate(schema, data)


def requests(document, mode, seen):
    for result in document.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(
            max_examples=max(EXAMPLES // 2, 1),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def one(case):
            prepare(operation.path, case.body)
            answer = case.call(timeout=120)
            seen[f"{operation.method.upper()} {operation.path}", answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)
            if answer.headers.get("content-type", [""])[0] == "text/event-stream":
                check_events(document, operation, answer.text)

        try:
            one()
        except hypothesis.errors.Unsatisfiable:
            # Where nothing is asked, nothing can be wrong.
            if mode is GenerationMode.POSITIVE:
                raise


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "wrong"])
def test_answers_are_as_the_document_says(document, http, mode):
    seen = collections.Counter()
    requests(document, mode, seen)
    print(sum(seen.values()), "requests:", dict(seen))
    wanted = 200 if mode is GenerationMode.POSITIVE else 400
    assert any(status == wanted for _, status in seen)
    bodies = {f"POST {path}" for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize")}
    assert bodies <= {operation for operation, _ in seen}
    assert http.get("/ready").status_code == 200
