"""overlays/local on a real cluster, as a user goes through it: in this order, each test on what the last one left."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from sluice.v1 import client_pb2, common_pb2

from deploy.client import Client, ClientError
from engine.credentials import client_trust
from engine.security_section import SecuritySection
from engine.trust import Trust
from tests.cluster import REPOSITORY
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.kube.conftest import Kubectl, run_documented, run_kubectl
from tests.kube.load import TIMEOUT_S, Asked, Load, stream
from tests.oracle import Oracle, assert_tokens_match

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.usefixtures("deployed")]

WORKLOADS = (
    "deployment/sluice-memcache-meta",
    "deployment/sluice-meta-server",
    "statefulset/sluice-prefill",
    "statefulset/sluice-decode",
)
FIRST_WORKERS = {"prefill-0/tp0", "decode-0/dp0/tp0"}
SECURE_URL = "https://sluice.sluice:8000"
HANDED_OVER = 'sluice_reruns_total{cause="preempted"}'
LONG_LENGTH, LONG_NEW_TOKENS = 200, 600
DEVICES = Path("/dev/shm/sluice-10001")
CACHES = ("pool_bytes", "pool_blocks")  # objects stay in the pool, as a cache


def status() -> client_pb2.GetStatusResponse:
    with Client("sluice.sluice:50051") as client:
        return client.status()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.2)


def ready_workers() -> set[str]:
    return {worker.info.worker_id for worker in status().workers if worker.health == "ready"}


def decoding() -> list[str]:
    """Decode groups that run a request."""
    workers = [worker for worker in status().workers if worker.info.role == common_pb2.WORKER_ROLE_DECODE]
    return [worker.info.group for worker in workers if worker.status.running and worker.health == "ready"]


def encrypted(security: SecuritySection) -> httpx.Client:
    """With the client's key."""
    verify = ssl.create_default_context(cafile=security.ca)
    headers = dict(client_trust(security).metadata)
    return httpx.Client(base_url=SECURE_URL, verify=verify, headers=headers, trust_env=False, timeout=TIMEOUT_S)


def logs(kubectl: Kubectl, pod: str) -> str:
    try:
        return kubectl("logs", pod)
    except AssertionError:  # it has not started
        return ""


def test_all_pods_get_ready(kubectl: Kubectl) -> None:
    """Field failure F5: pods never ready, because a probe asks for what the pod does not serve. F7, F9: a manifest that
    was never executed; a port on which nobody listens."""
    for workload in WORKLOADS:
        kubectl("rollout", "status", workload, "--timeout=180s")
    pods = json.loads(kubectl("get", "pods", "-o", "json"))["items"]
    assert len(pods) == len(WORKLOADS)
    restarts = {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}
    assert set(restarts.values()) == {0}, restarts


def test_a_completion_through_the_service_is_the_oracles(oracle: Oracle) -> None:
    prompt = prompt_of(200)
    assert_tokens_match(stream(prompt, 32), oracle.greedy(prompt, 32))


def test_status_and_health_are_answered_to_other_pods(kubectl: Kubectl) -> None:
    """Field failure F2: "" and every service have a health, an unknown one is NOT_FOUND."""
    command = ("python", "-m", "deploy.cli", "status", "--json", "--address", "sluice:50051")
    snapshot = json.loads(kubectl("exec", "sluice-prefill-0", "--", *command))
    assert snapshot["ready"] and len(snapshot["workers"]) == 2
    assert "decode-0/dp0/tp0" in run_documented("kubectl -n sluice exec sluice-decode-0")

    def probe(address: str, service: str) -> str:
        command = f"python -m deploy.probe --address {address} --service '{service}'; true"
        return kubectl("exec", "sluice-decode-0", "--", "sh", "-c", command).strip()

    for address, service in (
        ("sluice:50051", ""),
        ("sluice:50051", "sluice.v1.SluiceService"),
        ("sluice-meta:50051", "sluice.v1.RegistryService"),
        ("sluice-prefill-0.sluice-prefill:50100", "sluice.v1.WorkerService"),
        ("sluice-prefill-0.sluice-prefill:50100", "sluice.v1.PrefillService"),
        ("sluice-decode-0.sluice-decode:50100", "sluice.v1.DecodeService"),
    ):
        assert probe(address, service) == "", (address, service)
    assert "NOT_FOUND" in probe("sluice:50051", "sluice.v1.Unknown")


def test_pods_have_no_rights(kubectl: Kubectl) -> None:
    """Nothing in a pod can do anything with the cluster's API, and nothing is root."""
    account = "--as=system:serviceaccount:sluice:sluice"
    rights = kubectl("auth", "can-i", "--list", "--no-headers", account)
    granted = [line.split()[0] for line in rights.splitlines() if line.strip()]
    assert all(what.startswith(("[", "selfsubject")) for what in granted), rights  # what every account may do
    command = "test -e /var/run/secrets/kubernetes.io/serviceaccount/token; echo $?; id -u"
    assert kubectl("exec", "sluice-decode-0", "--", "sh", "-c", command).split() == ["1", "10001"]


def test_the_server_accepts_the_ascend_overlay() -> None:
    """Without running it: its pods need NPU hardware."""
    said = run_kubectl("apply", "--dry-run=server", "-f", str(REPOSITORY / "deploy" / "k8s" / "sluice.yaml"))
    assert said.count("(server dry run)") == len(said.splitlines()) > 10


def test_decode_scales_out(kubectl: Kubectl) -> None:
    kubectl("scale", "statefulset/sluice-decode", "--replicas=2")
    kubectl("rollout", "status", "statefulset/sluice-decode", "--timeout=180s")
    until(lambda: "decode-1/dp0/tp0" in ready_workers(), "the meta server knows the second group")


@pytest.mark.parametrize("force", [False, True], ids=["graceful", "killed"])
def test_a_stream_survives_the_deletion_of_its_decode_pod(kubectl: Kubectl, oracle: Oracle, force: bool) -> None:
    """Each token is delivered once, and all are the oracle's."""
    prompt = prompt_of(LONG_LENGTH)
    expected = oracle.greedy(prompt, LONG_NEW_TOKENS)
    asked = Asked(prompt, LONG_NEW_TOKENS)
    asked.wait_for(1)
    until(lambda: bool(decoding()), "a decode group tells of its request", 10)
    (group,) = decoding()
    assert asked.running
    how = ("--grace-period=0", "--force") if force else ()
    kubectl("delete", "pod", f"sluice-{group}", "--wait=false", *how)
    assert_tokens_match(asked.finish(), expected)
    kubectl("rollout", "status", "statefulset/sluice-decode", "--timeout=180s")


def test_a_rolling_restart_under_load_loses_no_request(kubectl: Kubectl, oracle: Oracle) -> None:
    """Everything that a client's request goes through is replaced: prefill has one group, so requests wait for it."""
    with Load(oracle) as load:
        for workload in WORKLOADS[1:]:
            kubectl("rollout", "restart", workload)
            kubectl("rollout", "status", workload, "--timeout=240s")
            load.wait_for_more(3)


def test_decode_scales_in_under_load(kubectl: Kubectl, oracle: Oracle) -> None:
    with Load(oracle) as load:
        kubectl("scale", "statefulset/sluice-decode", "--replicas=1")
        until(lambda: "sluice-decode-1" not in kubectl("get", "pods", "-o", "name"), "the second group is gone")
        load.wait_for_more(3)
    until(lambda: ready_workers() == FIRST_WORKERS, "the meta server forgot it")


def test_a_group_beyond_the_configured_ones_is_refused(kubectl: Kubectl) -> None:
    kubectl("scale", "statefulset/sluice-decode", "--replicas=3")
    text = "raise decode.groups in sluice.yaml"
    until(lambda: text in logs(kubectl, "sluice-decode-2"), "the third pod says why it cannot run")
    kubectl("scale", "statefulset/sluice-decode", "--replicas=1")


def test_accounting_returns_to_zero() -> None:
    def used() -> dict[str, int]:
        held = [(worker.info.worker_id, pool) for worker in status().workers for pool in worker.status.pools]
        return {f"{owner} {pool.name}": pool.used for owner, pool in held if pool.used and pool.name not in CACHES}

    until(lambda: used() == {}, "pools are empty", 30)
    assert status().requests_in_flight == 0


def test_a_secret_with_keys_and_certificates(
    kubectl: Kubectl, secured_overlay: Path, security: SecuritySection, oracle: Oracle
) -> None:
    """As docs/operations.md says: a Secret and a section of sluice.yaml; then nobody is served without both.

    Each pod holds two ranks now.
    """
    run_kubectl("apply", "-k", str(secured_overlay))
    for workload in WORKLOADS:
        kubectl("rollout", "status", workload, "--timeout=240s")
    trust = client_trust(security)

    ranks = {f"{group}/tp{rank}" for group in ("prefill-0", "decode-0/dp0") for rank in range(2)}

    def ready() -> bool:
        with Client("sluice.sluice:50051", trust) as client:
            return {w.info.worker_id for w in client.status().workers if w.health == "ready"} == ranks

    until(ready, "all ranks are known to a meta server that asks for keys")
    prompt = prompt_of(LONG_LENGTH)
    with encrypted(security) as http:
        keyless = http.post("/v1/completions", json={"prompt": prompt}, headers={"Authorization": ""})
    assert keyless.status_code == 401
    assert_tokens_match(stream(prompt, 8, connect=lambda: encrypted(security)), oracle.greedy(prompt, 8))
    with Client("sluice.sluice:50051", Trust(trust.ca)) as unknown, pytest.raises(ClientError, match="UNAUTHENTICATED"):
        unknown.status()
    with Client("sluice.sluice:50051") as plain, pytest.raises(ClientError, match=r"security\.ca is missing"):
        plain.status()
    assert "decode-0/dp0/tp0" in run_documented("kubectl -n sluice exec sluice-decode-0")


def test_what_outlasts_the_drain_is_handed_over(kubectl: Kubectl, security: SecuritySection, oracle: Oracle) -> None:
    """A stop that waits 0.2 s for a stream of seconds: its rest runs in the pod that comes."""
    prompt = prompt_of(LONG_LENGTH)
    asked = Asked(prompt, LONG_NEW_TOKENS, lambda: encrypted(security))
    asked.wait_for(1)
    kubectl("delete", "pod", "sluice-decode-0", "--wait=false")
    assert_tokens_match(asked.finish(), oracle.greedy(prompt, LONG_NEW_TOKENS))
    with encrypted(security) as http:
        (line,) = [line for line in http.get("/metrics").text.splitlines() if line.startswith(HANDED_OVER)]
    assert float(line.split()[1]) >= 1


def test_delete_leaves_nothing(kubectl: Kubectl, overlay: Path) -> None:
    run_kubectl("delete", "-k", str(overlay), "--timeout=180s")
    kinds = "all,configmaps,networkpolicies,poddisruptionbudgets,roles"
    assert run_kubectl("get", kinds, "-A", "-l", "app.kubernetes.io/name=sluice", "-o", "name") == ""
    assert "namespace/sluice" not in run_kubectl("get", "namespaces", "-o", "name").split()
    assert not DEVICES.exists(), sorted(DEVICES.rglob("*"))
