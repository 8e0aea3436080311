"""What the files of packaging/ ask of each other, as far as it can be seen without the tools that they are for."""

import json
import re
from pathlib import Path

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"


def test_the_dashboard_is_one():
    """What Grafana would mend in silence or show wrongly."""
    dashboard = json.loads((PACKAGING / "grafana/tokenrouter.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(0 <= x < 24 for x, _ in cells)
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels:
        if panel["type"] == "row":
            continue
        title, targets = panel["title"], panel["targets"]
        assert panel["datasource"] == source and all(target["datasource"] == source for target in targets), title
        assert len({target["refId"] for target in targets}) == len(targets), title
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["options"]["legend"]["showLegend"] is True, title
        for target in targets:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used == {"instance"} <= variables, f"{title}: {used}"
            # A legend that names a label the query does not keep would be empty.
            kept = re.search(r"by \(([^)]*)\)", target["expr"])
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert not kept or named <= set(re.findall(r"\w+", kept[1])), f"{title}: {named}"


def test_alerts_have_tests():
    """`promtool test rules`, which the tests do not need, tries each alert."""
    rules, tried = (
        set(re.findall(r"alert(?:name)?: (TokenRouter\w+)", (PACKAGING / "prometheus" / file).read_text()))
        for file in ("alerts.yml", "alerts_test.yml")
    )
    assert rules and rules == tried


def test_the_image_has_every_kind_of_plugin():
    text = (PACKAGING / "Dockerfile").read_text()
    assert "target/release/lib*.so" in text
    for source in PACKAGING.parent.glob("plugins/*/*.wat"):
        assert "target/release/*.wasm" in text, source
