"""GET /metrics through a strict parser, and what dashboards and alerts ask of it."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
CHAT = {"model": "rstitch", "messages": [{"role": "user", "content": "What is 47 * 83?"}], "temperature": 0}
LINE = re.compile(
    r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{[a-zA-Z_][a-zA-Z0-9_]*="([^"\\]|\\[\\"n])*"(,[a-zA-Z_][a-zA-Z0-9_]*="([^"\\]|\\[\\"n])*")*\})? \S+'
)


@pytest.fixture(scope="module")
def text(http):
    """A scrape after some requests."""
    for stream in (False, True):
        assert http.post("/v1/chat/completions", json=CHAT | {"stream": stream}).status_code == 200
    assert http.post("/v1/chat/completions", json=CHAT | {"strange\n\"": 1, "max_tokens": 3}).status_code == 200
    answer = http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.text


@pytest.fixture(scope="module")
def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families, family, sample, **labels):
    found = [s.value for s in families[family].samples if s.name == sample and s.labels == labels]
    assert len(found) == 1, (sample, labels)
    return found[0]


def test_the_format_is_kept(text):
    """What the parser forgives: each family in one piece with a head, no sample twice, plain lines."""
    heads, samples, family = set(), set(), None
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in heads and len(line.split(" ")) > 3, line
            heads.add(family)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family and kind in ("counter", "gauge", "histogram"), line
        else:
            assert LINE.fullmatch(line), line
            name = line.rsplit(" ", 1)[0]
            base = re.split(r"[{ ]", name)[0]
            allowed = {family} | ({family + end for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else set())
            assert base in allowed, line
            assert name not in samples, f"twice: {name}"
            samples.add(name)


def test_values_make_sense(families):
    for family in families.values():
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family.name
        for sample in family.samples:
            assert sample.value >= 0, sample
        if family.type == "histogram":
            series = {}
            for sample in family.samples:
                labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
                series.setdefault(labels, {}).setdefault(sample.name.removeprefix(family.name), []).append(sample)
            for parts in series.values():
                buckets = [(float(s.labels["le"]), s.value) for s in parts["_bucket"]]
                assert buckets == sorted(buckets) and buckets[-1][0] == float("inf")
                assert buckets[-1][1] == parts["_count"][0].value
                assert len(parts["_sum"]) == 1


def test_requests_are_counted(families):
    done = sum(
        value(families, "vllm:request_success", "vllm:request_success_total", model_name="rstitch", finished_reason=how)
        for how in ("stop", "length")
    )
    assert done >= 3
    first = "vllm:time_to_first_token_seconds"
    assert value(families, first, f"{first}_count", model_name="rstitch") >= done
    written = [
        value(families, "tokenrouter_tokens", "tokenrouter_tokens_total", route="rstitch", model=model)
        for model in ("small", "large")
    ]
    assert sum(written) == value(
        families, "vllm:generation_tokens", "vllm:generation_tokens_total", model_name="rstitch"
    )
    assert value(families, "tokenrouter_model_up", "tokenrouter_model_up", model="large") == 1
    assert value(families, "tokenrouter_unknown_fields", "tokenrouter_unknown_fields_total", field='strange\n"') == 1


def expressions():
    dashboard = json.loads((PACKAGING / "grafana/tokenrouter.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"dashboard: {panel['title']}", target["expr"]
    alerts = (PACKAGING / "prometheus/alerts.yml").read_text()
    for alert in re.split(r"- alert: ", alerts)[1:]:
        yield f"alert: {alert.split()[0]}", re.search(r"expr: (.*?)\n        (?:for|labels):", alert, re.S)[1]


@pytest.mark.parametrize(("place", "expression"), [pytest.param(*e, id=f"{i}-{e[0]}") for i, e in enumerate(expressions())])
def test_what_is_asked_for_exists(families, place, expression):
    known = {sample.name: set(sample.labels) for family in families.values() for sample in family.samples}
    names = set(re.findall(r"(?:vllm:|tokenrouter_|process_)\w+", expression))
    assert names or expression.startswith("up{"), place  # that one is Prometheus's own
    assert names <= set(known), f"{place} asks for {names - set(known)}"
    labels = set().union(*(known[name] for name in names)) | {"instance"}
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"(?:by|on) \(([^)]*)\)", expression))))
    assert grouped <= labels, f"{place} groups by {grouped - labels}"
