"""The manifests for KubeRay fit its objects, Ray's own command line, and each other. Nothing here needs a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.units import units, why_not_placed
from engine.config import load_config
from tests.cluster import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "k8s" / "kuberay"
SCHEMAS = json.loads((Path(__file__).parent / "kuberay_v1.json").read_text(encoding="utf-8"))
CLUSTER, JOB = (yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")) for name in ("cluster.yaml", "job.yaml"))
CONFIG = load_config(FOLDER / "sluice.yaml")
HEAD, WORKERS = CLUSTER["spec"]["headGroupSpec"], CLUSTER["spec"]["workerGroupSpecs"]


def container(group: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any]
    [only] = group["template"]["spec"]["containers"]
    return only


def offered(group: dict[str, Any]) -> dict[str, float]:
    """Ray's resources of one pod, from the quoted JSON that its shell passes on."""
    parameters = group["rayStartParams"]
    custom = json.loads(json.loads(parameters["resources"])) if "resources" in parameters else {}
    return {"CPU": float(parameters["num-cpus"]), **custom}


@pytest.mark.parametrize("manifest", [CLUSTER, JOB], ids=lambda manifest: str(manifest["kind"]))
def test_manifests_fit_the_objects_of_kuberay(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "ray.io/v1"
    errors = jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]]).iter_errors(manifest["spec"])
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_the_job_runs_on_the_cluster_that_is_applied_with_it() -> None:
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    ignored_or_refused = {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "suspend"}  # on a cluster that stays
    assert JOB["spec"]["backoffLimit"] == 0 and not ignored_or_refused & set(JOB["spec"])
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(kustomization["resources"]) == {"cluster.yaml", "job.yaml"}
    [generated] = kustomization["configMapGenerator"]
    mounted = {v["configMap"]["name"] for v in HEAD["template"]["spec"]["volumes"] if "configMap" in v}
    assert mounted == {generated["name"]}


def test_the_entry_point_of_the_manifest_runs() -> None:
    """Field failure F7: a manifest named an import path that did not exist, and nobody had ever run it.

    The tests in tests/ray run the same command on a real Ray cluster.
    """
    python, *arguments = JOB["spec"]["entrypoint"].split()
    assert python == "python" and arguments[-2:] == ["--config", "/etc/sluice/sluice.yaml"]
    command = [sys.executable, *arguments[:-1], str(FOLDER / "sluice.yaml")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert "/models/model" in done.stderr, "it comes as far as the checkpoint, which is not here"


def test_parameters_are_options_of_ray_start() -> None:
    help_ = subprocess.run(
        [str(Path(sys.executable).parent / "ray"), "start", "--help"], capture_output=True, text=True, timeout=60
    ).stdout
    names = {name for group in (HEAD, *WORKERS) for name in group["rayStartParams"]}
    assert [name for name in sorted(names) if f"--{name}" not in help_] == []
    assert CLUSTER["spec"]["rayVersion"] == pinned("ray")


def pinned(package: str) -> str:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def test_every_unit_finds_a_node_with_its_accelerators() -> None:
    """Field failure F6: the resource by which a group is placed has another name than the one the nodes offer."""
    nodes = {f"{group['groupName']}-{pod}": offered(group) for group in WORKERS for pod in range(group["replicas"])}
    for unit in units(CONFIG):
        homes = [n for n, has in nodes.items() if all(has.get(k, 0) >= v for k, v in unit.resources.items())]
        assert [home.partition("-")[0] for home in homes] == [unit.name.partition("-")[0]], why_not_placed(
            [unit], nodes, CONFIG.ray.strategy
        )
    for group in WORKERS:
        limits = container(group)["resources"]["limits"]
        assert float(limits["huawei.com/Ascend910"]) == offered(group)["NPU"], "what Kubernetes gives, Ray offers"
    assert offered(HEAD)["CPU"] == 0, "no group is placed on the head"


def test_probes_of_workers_ask_for_no_proxy() -> None:
    """Field failure F5: workers were never ready, because their probe asked for a proxy that only some nodes have.

    tests/ray asks a real Ray node the same questions.
    """
    for group in WORKERS:
        for kind in ("readinessProbe", "livenessProbe"):
            asked = container(group)[kind]["httpGet"]
            assert asked == {"path": "/api/local_raylet_healthz", "port": 52365}


def test_the_heads_service_has_the_ports_of_the_api() -> None:
    ports = {port["name"]: port["containerPort"] for port in container(HEAD)["ports"]}
    assert (ports["http"], ports["grpc"]) == (CONFIG.http.port, CONFIG.grpc.port)
    assert CONFIG.http.host == CONFIG.grpc.host == "0.0.0.0"
