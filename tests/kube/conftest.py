"""The deployment under test: overlays/local, applied to the cluster in whose network these tests run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.security_section import SecuritySection
from tests.certificates import Authority
from tests.checkpoints import PASSKEY_GLM
from tests.cluster import REPOSITORY
from tests.oracle import Oracle

OVERLAY = REPOSITORY / "deploy" / "k8s" / "overlays" / "local"
BUDGET = REPOSITORY / "deploy" / "k8s" / "disruption-budget" / "v1beta1"
OPERATIONS = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
HOST = "/host"  # where the cluster's node sees the files of this machine
NAMESPACE = "sluice"
Kubectl = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of this folder's tests: the hook is given every test of the run."""
    if not os.environ.get("SLUICE_KUBE_TEST"):
        for item in filter(lambda item: item.path.is_relative_to(Path(__file__).parent), items):
            item.add_marker(pytest.mark.skip(reason="needs a cluster: SLUICE_KUBE=.../cluster.sh make kube-test"))


def run_kubectl(*arguments: str, timeout_s: float = 240.0) -> str:
    """Standard output. Fails with everything it said."""
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def run_documented(command: str, folder: Path = REPOSITORY) -> str:
    """Runs the one line of docs/operations.md that begins so, in `folder`; its standard output."""
    (line,) = {line.strip() for line in OPERATIONS.splitlines() if line.strip().startswith(command)}
    done = subprocess.run(shlex.split(line), cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    """Runs kubectl in the deployment's namespace."""
    return lambda *arguments: run_kubectl("-n", NAMESPACE, *arguments)


@pytest.fixture(scope="session")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """overlays/local with the checkpoint of this repository."""
    folder = tmp_path_factory.mktemp("overlay")
    (folder / "kustomization.yaml").write_text(
        f"""apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{os.path.relpath(OVERLAY, folder)}]
patches:
  - target: {{kind: Deployment|StatefulSet}}
    patch: |
      - {{op: replace, path: /spec/template/spec/volumes/3/hostPath/path, value: {HOST}{PASSKEY_GLM.parent}}}
""",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="session")
def security(tmp_path_factory: pytest.TempPathFactory, kubectl: Kubectl, deployed: None) -> SecuritySection:
    """The Secret as docs/operations.md makes it; returns what clients need of it."""
    folder = tmp_path_factory.mktemp("secret")
    authority = Authority(folder, "ca")
    authority.issue("tls", names=("sluice", "sluice.sluice"))
    (folder / "api-keys").write_text("a-client\n", encoding="utf-8")
    (folder / "worker-keys").write_text("a-worker\n", encoding="utf-8")
    run_documented("kubectl -n sluice create secret generic", folder)
    return SecuritySection(ca=str(authority.file), api_keys=str(folder / "api-keys"))


@pytest.fixture(scope="session")
def secured_overlay(overlay: Path, security: SecuritySection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`overlay` with the section `security` of docs/operations.md, two ranks in every pod and hardly a drain."""
    folder = tmp_path_factory.mktemp("secured")
    text = (OVERLAY / "sluice.yaml").read_text(encoding="utf-8")
    for line, count, other in (("tp: 1\n", 2, "tp: 2\n"), ("512MiB", 1, "256MiB"), ("drain_s: 10", 1, "drain_s: 0.2")):
        assert text.count(line) == count
        text = text.replace(line, other)
    (section,) = re.findall(r"```yaml\n(security:\n.*?)```", OPERATIONS, re.DOTALL)
    (folder / "sluice.yaml").write_text(f"{text}{section}", encoding="utf-8")
    (folder / "kustomization.yaml").write_text(
        f"""apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{os.path.relpath(overlay, folder)}]
configMapGenerator:
  - {{name: sluice-config, namespace: {NAMESPACE}, behavior: replace, files: [sluice.yaml]}}
""",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="session")
def deployed(overlay: Path, kubectl: Kubectl) -> Iterator[None]:
    """Everything applied; it is deleted again by the last test, or here if that one was not run."""
    run_kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")  # of a run that failed
    run_kubectl("apply", "-k", str(overlay))
    run_kubectl("apply", "-k", str(BUDGET))
    yield
    run_kubectl("delete", "-k", str(overlay), "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle(PASSKEY_GLM)
