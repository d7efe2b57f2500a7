"""deploy/k8s: valid for every server from 1.20 on, and true to the code it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.pod_plan import Role
from engine.config import SluiceConfig, build_config
from tests.cluster import REPOSITORY

K8S = REPOSITORY / "deploy" / "k8s"
OVERLAYS = ("local", "ascend-a3")
OLDEST, NEWEST = "1.20", kubernetes_validate.latest_version()
OLD_SCHEMAS = REPOSITORY / "build" / "kubernetes-validate-1.20"  # up to 1.28; those of the environment begin with 1.25
STOP_SLACK_S = 20  # what a stop needs beside runtime.drain_s

Manifest = dict[str, Any]
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@cache
def rendered(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "warnings are failures"
    return done.stdout


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def pods(overlay: str) -> dict[str, tuple[Manifest, Manifest]]:
    """Pod specifications and their workloads by role."""
    found = {}
    for document in documents(rendered(K8S / "overlays" / overlay)):
        if document["kind"] in ("Deployment", "StatefulSet"):
            spec = document["spec"]["template"]["spec"]
            found[spec["containers"][0]["command"][-1]] = (spec, document)
    return found


def config_of(overlay: str) -> SluiceConfig:
    maps = [d for d in documents(rendered(K8S / "overlays" / overlay)) if d["kind"] == "ConfigMap"]
    (config,) = maps
    return build_config(yaml.safe_load(config["data"]["sluice.yaml"]))


def complaints(text: str, version: str, folder: Path) -> str:
    """What `kubernetes-validate --strict` says for a server of `version`; nothing if all is well."""
    file = folder / "manifests.yaml"
    file.write_text(text, encoding="utf-8")
    environment = os.environ | ({"PYTHONPATH": str(OLD_SCHEMAS)} if version in (OLDEST, "1.21") else {})
    command = [sys.executable, "-m", "kubernetes_validate", "--kubernetes-version", version, "--strict", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() + done.stdout.splitlines() if " passed " not in line]
    return "\n".join(said) if said or done.returncode == 0 else f"exit status {done.returncode}"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_are_valid_for_the_oldest_and_the_newest_server(version: str, tmp_path: Path) -> None:
    """Field failure F7: a manifest that nobody has executed. (`make kube-test` executes the local overlay.)"""
    found = documents((K8S / "sluice.yaml").read_text(encoding="utf-8"))
    if shutil.which("kubectl"):
        found += [d for d in documents(rendered(K8S / "overlays" / "local")) if d not in found]
    assert complaints(yaml.safe_dump_all(found), version, tmp_path) == ""


def test_an_unknown_field_is_found(tmp_path: Path) -> None:
    text = (K8S / "sluice.yaml").read_text(encoding="utf-8")
    assert "specification" in complaints(text.replace("\nspec:", "\nspecification:", 1), NEWEST, tmp_path)


@needs_kubectl
def test_the_rendered_file_is_the_ascend_overlay() -> None:
    text = (K8S / "sluice.yaml").read_text(encoding="utf-8")
    assert text == rendered(K8S / "overlays" / "ascend-a3"), "run: make k8s"


@needs_kubectl
@pytest.mark.parametrize(("api", "version"), [("v1beta1", OLDEST), ("v1", "1.21"), ("v1", NEWEST)])
def test_budgets_are_valid_for_their_servers(api: str, version: str, tmp_path: Path) -> None:
    assert complaints(rendered(K8S / "disruption-budget" / api), version, tmp_path) == ""


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_role_has_a_pod_that_is_not_root(overlay: str) -> None:
    found = pods(overlay)
    assert set(found) == set(Role)
    for spec, _ in found.values():
        (container,) = spec["containers"]
        assert container["command"][:3] == ["python", "-m", "deploy.pod"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {entry["name"] for entry in container["env"]} >= {"POD_NAME", "POD_IP"}
        assert container["resources"]["requests"]["memory"] and container["resources"]["limits"]["memory"]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_there_is_time_to_drain(overlay: str) -> None:
    """Field failure B32: a grace period shorter than what a stop needs."""
    config = config_of(overlay)
    for role, (spec, workload) in pods(overlay).items():
        if role != Role.POOL_SERVICE:
            assert spec["terminationGracePeriodSeconds"] >= config.runtime.drain_s + STOP_SLACK_S, role
        if role == Role.META_SERVER:
            assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
            probe = spec["containers"][0]["readinessProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] == config.runtime.rerun_patience_s


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_ports_and_names_are_those_of_the_configuration(overlay: str) -> None:
    """Field failure F9: a server that nobody started on the port that others were told."""
    config = config_of(overlay)
    services = {
        d["metadata"]["name"]: d["spec"]
        for d in documents(rendered(K8S / "overlays" / overlay))
        if d["kind"] == "Service"
    }
    wanted = {
        Role.META_SERVER: {"http": config.http.port, "grpc": config.grpc.port},
        Role.POOL_SERVICE: {
            "meta": config.pool.meta_port,
            "config": config.pool.config_port,
            "metrics": config.pool.metrics_port,
        },
        Role.PREFILL: {"grpc": config.grpc.worker_port},
        Role.DECODE: {"grpc": config.grpc.worker_port},
    }
    for role, (spec, workload) in pods(overlay).items():
        ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
        assert ports == wanted[Role(role)]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        chosen = [service for service in services.values() if service["selector"].items() <= labels.items()]
        assert chosen, f"no Service for {role}"
        for service in chosen:
            assert {port["name"]: port["port"] for port in service["ports"]}.items() <= wanted[Role(role)].items()
    assert config.grpc.host in services and services[config.grpc.host]["publishNotReadyAddresses"]
    assert config.pool.host in services and services[config.pool.host].get("clusterIP") != "None"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_groups_can_be_scaled_beyond_the_first(overlay: str) -> None:
    config = config_of(overlay)
    for role, most in ((Role.PREFILL, config.prefill.groups), (Role.DECODE, config.decode.groups)):
        assert 1 <= pods(overlay)[role][1]["spec"]["replicas"] < most


@needs_kubectl
def test_a_group_has_the_devices_of_its_workers() -> None:
    """Field failure F6: a resource name or number that no node has."""
    config = config_of("ascend-a3")
    workers = {Role.PREFILL: config.prefill.tp, Role.DECODE: config.decode.dp * config.decode.tp}
    for role, count in workers.items():
        resources = pods("ascend-a3")[role][0]["containers"][0]["resources"]
        for kind in ("requests", "limits"):
            assert resources[kind]["huawei.com/Ascend910"] == str(count)


def test_the_image_is_built_from_all_native_sources() -> None:
    """They are copied one by one, so that a change of Python code does not build them again."""
    cmake = (REPOSITORY / "CMakeLists.txt").read_text(encoding="utf-8")
    folders = re.findall(r"^\s*add_subdirectory\(([\w/]+)\)", cmake, re.MULTILINE)
    assert "transfer/hostcann" in folders
    lines = (REPOSITORY / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert [folder for folder in folders if f"COPY {folder} {folder}" not in lines] == []
