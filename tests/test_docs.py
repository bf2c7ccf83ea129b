"""What the documents say of metrics, configuration keys and files is true."""

import json
import re
from dataclasses import fields
from pathlib import Path

from policy.serving.config import DraftingPolicyConfig
from policy.serving.metrics import COUNTERS

DOCS = Path(__file__).parents[1] / "docs"
EXPOSED = {f"draftgym_{name}_total" for name in COUNTERS} | {"draftgym_policy_info"}


def metrics_in(text):
    return set(re.findall(r"draftgym_[a-z_]+", text)) - {"draftgym_"}


def test_every_metric_is_documented_and_no_other():
    table = (DOCS / "metrics.md").read_text().split("## Useful")[0]
    assert metrics_in(table) == EXPOSED
    for document in DOCS.glob("*.md"):
        assert metrics_in(document.read_text()) <= EXPOSED


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert metrics_in(" ".join(expressions)) == EXPOSED
    assert all(one.count("(") == one.count(")") for one in expressions)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_key_of_the_section_is_documented():
    table = (DOCS / "deploying.md").read_text()
    for key in fields(DraftingPolicyConfig):
        assert key.name == "external" or f"`{key.name}`" in table


def test_links_between_documents_lead_somewhere():
    for document in DOCS.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" in link:
                continue
            assert (DOCS / link).exists(), f"{document.name} links to {link}"
