"""What the tests that drive a server with real clients share."""

import json
import os

from servers import KEYS, PROGRAM, ROOM, ROOT, serving

# Read when clients are imported, so before that: they take nothing from the net, and keep nothing at home.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(PROGRAM.parents[1] / "huggingface"),
}

# What requests may set at the servers.
os.environ |= {"TOKENROUTER__ROUTES__RSTITCH__OVERRIDES": "threshold"}

import httpx
import openai
import pytest


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Base address of a server that is ready."""
    with serving(tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    """Base address of a server with keys and room for few answers, none of which wait."""
    limits = {"max_requests": ROOM, "max_requests_per_client": ROOM, "max_queued_requests": 0}
    with serving(tmp_path_factory.mktemp("guarded") / "log", api_keys=",".join(KEYS), **limits) as address:
        yield address


@pytest.fixture(scope="session")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def http(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.fixture(scope="session", params=["small", "large", "rstitch", "me"])
def model(request):
    """Bare models and routes."""
    return request.param


@pytest.fixture(scope="session")
def byte_tokens():
    """Token ids of single bytes, in the demo models' tokenizer."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in itself]
    alphabet = {b: chr(b) for b in itself} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    vocabulary = json.loads((ROOT / "models/demo/small/tokenizer.json").read_text())["model"]["vocab"]
    return {b: vocabulary[c] for b, c in alphabet.items()}
