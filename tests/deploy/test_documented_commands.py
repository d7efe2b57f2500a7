"""Every command line of the documents is run by a test, or is marked there as one that needs NPU hardware."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PROGRAMS = ("buf", "curl", "docker", "kubectl", "make", "mfcli", "npu-smi", "pip", "python", "ray", "sluice", "sysctl")
_BLOCK = re.compile(r"^ *```\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_CONTINUED = re.compile(r" *\\\n *")
_COMMENT = re.compile(r" +# .*")

COMMANDS, RAY, KUBE = "tests/e2e/test_commands.py", "tests/ray/test_job.py", "tests/kube/test_kubernetes.py"
README_LINES = f"{COMMANDS}::test_commands_of_the_readme"
TESTED = {
    "sluice up": "tests/cluster.py::Cluster",
    "sluice status": README_LINES,
    "sluice status --address sluice.example:50051 --set security.ca=": "tests/e2e/test_security.py::"
    "test_a_secured_deployment_answers_like_any_other",
    "sluice generate": README_LINES,
    "sluice plan --model ~": f"{COMMANDS}::test_planning_as_in_the_readme",
    "sluice plan --model tests/full_size": "tests/deploy/test_operations_page.py::test_the_command_for_sizing_runs",
    "curl localhost:8000": README_LINES,
    "buf curl": README_LINES,
    "ray start --head": "tests/ray/ray_cli.py::RayHead",
    "ray job": f"{RAY}::test_completion_equals_the_oracle",
    "ray job logs": "tests/ray/ray_cli.py::RayHead",
    "ray job stop": f"{RAY}::test_stopping_the_job_leaves_nothing",
    "python -m deploy.ray_job": f"{RAY}::test_completion_equals_the_oracle",
    "python -m deploy.probe": "tests/deploy/test_pod.py::test_probes_tell_alive_from_ready",
    "kubectl apply -k deploy/k8s/overlays/local": f"{KUBE}::test_all_pods_get_ready",
    "kubectl -n sluice create secret generic": f"{KUBE}::test_a_secret_with_keys_and_certificates",
    "kubectl -n sluice exec": f"{KUBE}::test_status_and_health_are_answered_to_other_pods",
    "kubectl -n sluice get pods": f"{KUBE}::test_all_pods_get_ready",
    "kubectl -n sluice logs": f"{KUBE}::test_a_group_beyond_the_configured_ones_is_refused",
    "kubectl -n sluice rollout": f"{KUBE}::test_a_rolling_restart_under_load_loses_no_request",
    "kubectl -n sluice scale": f"{KUBE}::test_decode_scales_out",
    "SLUICE_KUBE=path/to/cluster make kube-test": f"{KUBE}::test_all_pods_get_ready",
}
"""How a command begins, and the test (or what tests use) that runs it."""


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Commands and the paragraphs they stand in: lines of blocks, and whole commands within the text."""
    found = []
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        before = text[: block.start()].rstrip().rpartition("\n\n")[2]
        for line in _CONTINUED.sub(" ", block[1]).splitlines():
            command = _COMMENT.sub("", line).strip()
            found += [(command, f"{before}\n{line}")] if _is_command(command) else []
    for paragraph in re.split(r"\n\n|\n(?=\||\d+\. |\* )", _FENCED.sub("\n\n", text)):
        spans = [" ".join(span.split()) for span in _SPAN.findall(paragraph)]
        found += [(span, paragraph) for span in spans if _is_command(span) and not _is_name(span)]
    return found


def _is_name(span: str) -> bool:
    """Of a subcommand, as in "`ray stop` kills"."""
    words = span.split()
    return len(words) == 2 and words[0] not in ("make", "npu-smi", "sysctl")


def _is_command(line: str) -> bool:
    """A program with arguments; variables set for it may come first."""
    words = [word for word in line.split() if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    if not words or words[0] not in PROGRAMS or words[:2] == ["sluice", "ready"]:  # that one is printed
        return False
    return len(words) > 1


EVERY = [(page.name, *found) for page in PAGES for found in commands_of(page)]


def _of_make(command: str) -> bool:
    return command.startswith("make ")


def test_commands_are_found() -> None:
    found = {command.split()[0] for _, command, _ in EVERY}
    assert found >= {"sluice", "curl", "buf", "make", "kubectl", "ray", "docker", "sysctl"}
    assert any("return_token_ids" in command for _, command, _ in EVERY), "continued lines are joined"


@pytest.mark.parametrize(("page", "command", "around"), [found for found in EVERY if not _of_make(found[1])])
def test_it_is_run_by_a_test_or_marked(page: str, command: str, around: str) -> None:
    begins = [begin for begin in TESTED if command.startswith(begin)]
    if begins:
        file, _, name = TESTED[max(begins, key=len)].partition("::")
        assert re.search(rf"(def|class) {name}\b", (REPOSITORY / file).read_text(encoding="utf-8")), TESTED[begins[0]]
    else:
        assert "[NPU]" in around or "NPU hardware" in around, f"{page}: nothing runs: {command}"


def test_nothing_is_listed_that_no_page_says() -> None:
    said = [command for _, command, _ in EVERY]
    assert [begin for begin in TESTED if not any(command.startswith(begin) for command in said)] == []


@pytest.mark.parametrize("command", sorted({command for _, command, _ in EVERY if _of_make(command)}))
def test_targets_of_make_start_programs_that_exist(command: str) -> None:
    """They are what `make` itself says; continuous integration runs setup, lint and test."""
    fixed = command.replace("MINUTES=...", "MINUTES=1")
    environment = {"PATH": "/usr/bin:/bin", "SLUICE_KUBE": "true"}
    make = ["make", "--dry-run", "--always-make", *shlex.split(fixed)[1:]]
    done = subprocess.run(make, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules = re.findall(r"python -m ([\w.]+)", done.stdout)
    assert done.stdout.strip()
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
