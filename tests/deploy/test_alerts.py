"""deploy/k8s/alerts.yaml asks for metrics that exist, and docs/operations.md explains each alert."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.cluster import REPOSITORY
from tests.meta_server.deployment import deployed

RULES = REPOSITORY / "deploy" / "k8s" / "alerts.yaml"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


@pytest.mark.anyio
async def test_rules_ask_for_metrics_that_exist() -> None:
    async with deployed() as deployment:
        assert (await deployment.complete(max_tokens=2)).status_code == 200
        shown = (await deployment.http.get("/metrics")).text
        names = {line.split("{")[0].split(" ")[0] for line in shown.splitlines() if not line.startswith("#")}
        declared = set(re.findall(r"^# TYPE (\w+)", shown, re.MULTILINE))
    for rule in rules():
        asked = set(re.findall(r"sluice_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= names | declared, (rule["alert"], asked - names - declared)


def test_outcomes_and_pools_asked_for_are_those_of_the_code() -> None:
    text = RULES.read_text(encoding="utf-8")
    files = ("meta_server/metrics.py", "decode_node/status.py", "prefill_node/status.py")
    code = "".join((REPOSITORY / file).read_text(encoding="utf-8") for file in files)
    values = {value for found in re.findall(r'(?:outcome|pool)=~?"([\w|]+)"', text) for value in found.split("|")}
    assert {"failed", "refused", "host_blocks", "kv_blocks"} <= values
    assert [value for value in sorted(values) if f'"{value}"' not in code] == []


def test_every_alert_is_explained() -> None:
    page = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in page] == []
