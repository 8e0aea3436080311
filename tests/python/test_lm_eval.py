"""lm-evaluation-harness against the server: what it measures is what the server itself says.

Its `local-completions` reads log-probabilities of prompts (`echo`, `logprobs`, `max_tokens: 1`). They are compared with
those of the same tokens written one at a time, each forced by a bias, which `logprobs` do not count.
"""

import json
import re
from functools import cache
from operator import itemgetter

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from servers import ROOT

MODEL = "small"
TASKS = ROOT / "tests/python/tasks"
TOKENIZER = ROOT / "models/demo" / MODEL
DOCUMENTS = [json.loads(line) for line in (TASKS / "products.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(url):
    """Results by task, and samples by task."""
    evaluation = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer": str(TOKENIZER),
                    "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1},
        batch_size=3,
        tasks=["demo_products", "demo_products_written"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=True,
    )
    samples = {task: sorted(lines, key=itemgetter("doc_id")) for task, lines in evaluation["samples"].items()}
    return evaluation["results"], samples


def likelihoods(client):
    """For each document, the log-probability of each choice, by tokens that are written one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    @cache
    def one(prompt, token):
        answer = client.completions.create(
            model=MODEL, prompt=list(prompt), max_tokens=1, temperature=0, logprobs=0, logit_bias={str(token): 100},
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].logprobs.token_logprobs[0]

    for document in DOCUMENTS:
        message = [{"role": "user", "content": document["question"]}]
        context = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        # The harness counts white space at the end of a context to the choice.
        begin = len(encode(context.rstrip()))
        yield [
            sum(one(tuple(ids[:place]), ids[place]) for place in range(begin, len(ids)))
            for ids in (encode(context + choice) for choice in document["choices"])
        ]


def test_likeliest_choice(measured, client):
    results, samples = measured
    direct = list(likelihoods(client))
    got = [[float(choice[0][0]) for choice in sample["resps"]] for sample in samples["demo_products"]]
    assert len(got) == len(DOCUMENTS)
    for have, want in zip(got, direct, strict=True):
        assert have == pytest.approx(want, abs=1e-3)
    best = [max(range(4), key=choices.__getitem__) for choices in direct]
    right = sum(choice == document["label"] for choice, document in zip(best, DOCUMENTS, strict=True))
    assert 0 < right < len(DOCUMENTS), "this model knows some, so that the number says something"
    assert results["demo_products"]["acc,none"] == right / len(DOCUMENTS)


def test_written_answers(measured, client):
    results, samples = measured
    right = 0
    for document, sample in zip(DOCUMENTS, samples["demo_products_written"], strict=True):
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": document["question"]}], max_tokens=60, temperature=0
        )
        text = answer.choices[0].message.content
        assert sample["resps"][0][0] == text
        right += re.search(r"Answer: (\d+)", text)[1] == document["answer"]
    assert results["demo_products_written"]["exact_match,answer"] == right / len(DOCUMENTS)
