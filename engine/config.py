"""The one configuration file, ``sluice.yaml``: every process of a deployment reads the same one.

Unknown keys and values outside their legal range are refused at start with the field's path, the value and what is
legal. Settings of MemFabric and MemCache are derived from it. Sizes in bytes accept ``"512MiB"``-style strings.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from engine.config_fields import Bytes, Port, Positive, Probability, Seconds, Section, lower, switch
from engine.security_section import VARIABLE, SecuritySection
from engine.yaml_text import parse_yaml


class ConfigError(ValueError):
    """The configuration cannot be used; the text names the field's path, its value and the legal values."""


class ModelSection(Section):
    path: Annotated[str, Field(min_length=1)] = Field(
        description="Hugging Face checkpoint directory (config.json, safetensors, optionally tokenizer)"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights, activations and KV")
    name: str | None = Field(None, description="name in the OpenAI API; the directory's name if absent")
    max_model_len: Positive | None = Field(None, description="tokens; the checkpoint's own limit if absent")


class KvSection(Section):
    block_size: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="tokens per block, equal on both sides")
    indexer_dtype: Literal["model", "int8"] = Field(
        "model", description="of cached index keys; int8 (LIC8) takes half the memory of bfloat16 ones"
    )
    main_dtype: Literal["model"] = Field("model", description="of main KV, which is never quantised or packed")


class HostcannSection(Section):
    """The emulated Ascend driver; ignored on machines with a real one."""

    chip: Literal["Ascend910_9382", "Ascend910B4"] = Field(
        "Ascend910_9382",
        description="what aclrtGetSocName answers; Ascend910_9382 behaves as A3, Ascend910B4 as A2",
    )
    devices: Positive | None = Field(None, description="emulated devices; one per worker process if absent")
    hbm_bytes: Bytes = Field(1 << 30, description="memory of each emulated device")
    root: str | None = Field(None, description="folder for device memory; below /dev/shm if absent")


class PrefillSection(Section):
    groups: Positive = Field(1, description="independent prefill nodes")
    tp: Positive = Field(1, description="tensor-parallel workers per group; a multiple of decode.tp")
    shared_buffers: Positive = Field(2, description="B: layer buffers shared round-robin by all non-independent layers")
    independent_layers: list[int] | Literal["all"] = Field([0], description="layers with a buffer of their own")
    max_tokens_per_step: Positive = Field(512, description="token budget of one prefill step, over all its requests")
    max_requests: Positive = Field(16, description="requests computed together in one group")
    max_waiting: Positive = Field(256, description="requests queued in one group; further ones are refused with 429")
    max_whole_tokens: Positive = Field(
        8192, description="longest prompt computed in a single step, whatever its budget, while the pool is down"
    )
    kv_blocks: Positive | None = Field(None, description="blocks of each layer buffer; from the HBM size if absent")
    threads: Positive = Field(1, description="compute threads per worker process")


class DecodeSection(Section):
    groups: Positive = Field(1, description="independent decode nodes")
    dp: Positive = Field(1, description="data-parallel replicas per group, each with its own host pool")
    tp: Positive = Field(1, description="tensor-parallel workers per DP rank, sharing its host pool")
    hot_tokens: Positive = Field(128, description="hot-buffer tokens per request and layer, at least index_topk")
    host_pool_bytes: Bytes = Field(256 << 20, description="main-KV host memory per DP rank, over all layers")
    speculative_tokens: Annotated[int, Field(ge=0, le=13)] = Field(
        0, description="tokens drafted per step by the checkpoint's multi-token-prediction layer; 0 = off"
    )
    selection: Literal["residency", "lim"] = Field(
        "residency",
        description="who finds the top-k's hot slots: the plain indexer and LRU residency, or the fused indexer (LIM)",
    )
    max_requests: Positive = Field(16, description="requests decoded together per DP rank (hot-buffer rows)")
    max_waiting: Positive = Field(256, description="requests waiting for blocks per DP rank; further ones get 429")
    headroom_tokens: Annotated[int, Field(ge=0)] = Field(
        64, description="tokens every request must still have room for when another one is let in"
    )
    reservation_s: Seconds = Field(120.0, description="longest time a request's blocks wait for prefill's next layer")
    threads: Positive = Field(1, description="compute threads per worker process")

    @property
    def step_tokens(self) -> int:
        """Positions a step writes at most, from a request's newest token on.

        With k drafts these are 1 + k verified ones; if all are right, drafting anew writes k - 1 more behind them.
        """
        return max(1, 2 * self.speculative_tokens)


class TransferSection(Section):
    protocol: Annotated[Literal["sdma", "device_rdma", "device_urma"], BeforeValidator(lower)] = Field(
        "sdma", description="how MemFabric moves bytes; equal on both sides"
    )
    lease_s: Seconds = Field(30.0, description="longest time prefill holds a buffer for one reader")
    read_timeout_s: Seconds = Field(10.0, description="deadline of one batched MemFabric read; below lease_s")
    read_retries: Annotated[int, Field(ge=0, le=10)] = Field(
        3, description="how often a failed read is tried again, after 0.05, 0.1, 0.2, ... s, while its lease lasts"
    )
    checksum: Annotated[Literal["off", "sample", "all"], BeforeValidator(switch)] = Field(
        "off",
        description="which blocks prefill sends checksums of and decode compares after its read; all: one more pass "
        "over the bytes on each side (`make bench-transfer` times it); sample: every 16th block",
    )
    handshake_timeout_s: Seconds = Field(20.0, description="deadline of opening a link to a new peer")
    store_port: Port = Field(0, description="MemFabric config store; 0 = a free port")


class PoolSection(Section):
    host: str | None = Field(None, description="address of MemCache's MetaService; runtime.host if absent")
    protocol: Literal[
        "host_shm", "host_tcp", "host_rdma", "host_urma", "device_sdma", "device_rdma", "device_urma", "device_uboe"
    ] = Field("host_shm", description="how MemCache moves bytes between its members; host_shm is for one host")
    dram_bytes: Bytes = Field(256 << 20, description="MemCache memory given by each prefill worker process")
    meta_port: Port = Field(0, description="MemCache MetaService; 0 = a free port")
    config_port: Port = Field(0, description="MemCache config store; 0 = a free port")
    metrics_port: Port = Field(0, description="MemCache REST metrics; 0 = a free port")
    timeout_s: Seconds = Field(20.0, description="deadline of one pool operation")
    checksum: Annotated[Literal["off", "on"], BeforeValidator(switch)] = Field(
        "on",
        description="verify every block that is loaded from the pool; a wrong one is computed again. Without it, rows "
        "of another prompt may be taken for a block's while the pool's service is being restarted; what it costs, "
        "`make bench-prefill` tells",
    )


class HttpSection(Section):
    host: str = Field("127.0.0.1", description="address the OpenAI API listens on")
    port: Port = Field(8000, description="0 = a free port")


class GrpcSection(Section):
    host: str = Field("127.0.0.1", description="address the meta server's gRPC services listen on")
    port: Port = Field(50051, description="0 = a free port")
    worker_port: Port = Field(
        0, description="of the first worker process on a machine or in a pod, the others follow; 0 = free ports"
    )


class RuntimeSection(Section):
    host: str = Field("127.0.0.1", description="address by which worker processes of this machine are reached")
    run_dir: str | None = Field(None, description="logs and sockets of one run; a new folder below /tmp if absent")
    startup_timeout_s: Seconds = Field(300.0, description="longest time until the deployment is ready")
    heartbeat_s: Seconds = Field(1.0, description="period of the workers' reports to the meta server")
    lost_after_s: Seconds = Field(10.0, description="a worker silent for this long is lost")
    restart: bool = Field(
        False,
        description="whether `sluice up` starts processes that died again, with their TP ranks (Ray and Kubernetes do)",
    )
    restarts_per_minute: Positive = Field(
        5, description="how often the same group is started again before it is given up"
    )
    collective_timeout_s: Seconds = Field(120.0, description="longest wait of one rank for the others")
    request_timeout_s: Seconds = Field(600.0, description="longest life of one request")
    max_reruns: Annotated[int, Field(ge=0)] = Field(
        3, description="how often a request whose worker was lost goes on elsewhere; preemptions do not count"
    )
    rerun_wait_s: Seconds | None = Field(
        None,
        description="how long such a request waits for a group that can go on with it, then 503; "
        "60 with runtime.restart and 1 without it if absent",
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="how long a process that is told to stop goes on with the requests it has; 0 = not at all"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of every process")

    @property
    def rerun_patience_s(self) -> float:
        """`rerun_wait_s`, or its default: long only where somebody will start what died."""
        if self.rerun_wait_s is not None:
            return self.rerun_wait_s
        return 60.0 if self.restart else 1.0


def _custom_resources(value: object) -> object:
    """Refuses what Ray has an option of its own for."""
    if isinstance(value, dict) and (own := {"CPU", "GPU", "memory", "object_store_memory"} & value.keys()):
        raise ValueError(f"{sorted(own)} are Ray's own resources; write custom ones, as {{NPU: 1}}")
    return value


Resources = Annotated[dict[str, Annotated[float, Field(gt=0)]], BeforeValidator(_custom_resources)]


class RaySection(Section):
    """Where `python -m deploy.ray_job` places the groups; ignored by everything else."""

    strategy: Literal["pack", "spread", "strict_spread"] = Field(
        "spread",
        description="pack: on as few nodes as possible; spread: on different ones as far as possible; strict_spread: "
        "every TP group on a node of its own, so prefill and decode never share one",
    )
    cpus_per_rank: Annotated[float, Field(ge=0)] = Field(1.0, description="Ray's CPU resource that each rank takes")
    prefill_resources: Resources = Field({}, description="custom resources that each prefill rank takes: {NPU: 1}")
    decode_resources: Resources = Field({}, description="custom resources that each decode rank takes: {NPU: 1}")


class FaultsSection(Section):
    """Faults on demand, for tests; all off by default."""

    zero_host_rows: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="decode zeroes the host-pool rows of requests whose id contains this text, once pulled"
    )
    seed: int = Field(0, description="of all draws; each worker draws for itself, and again the same after a restart")
    message_drop: Probability = Field(0.0, description="of a message between prefill and decode ranks: it is not sent")
    message_delay: Probability = Field(0.0, description="of such a message: sent late, and overtaken by later ones")
    message_delay_s: Seconds = Field(0.2, description="how late")
    message_duplicate: Probability = Field(0.0, description="of such a message: it is sent twice")
    message_corrupt: Probability = Field(0.0, description="of such a message: one byte of it is changed")
    ack_loss: Probability = Field(0.0, description="of decode's answer to a batch (read or failed): it is not sent")
    read_failure: Probability = Field(0.0, description="of a read from prefill's memory: it is reported as failed")
    read_corrupt: Probability = Field(0.0, description="of such a read: one byte that arrived is changed")
    read_delay_s: Annotated[float, Field(ge=0)] = Field(0.0, description="sleep of decode before each such read")
    stall: Probability = Field(0.0, description="of a worker's step: it begins with a sleep")
    stall_s: Seconds = Field(1.0, description="of that sleep")
    device_allocation_failure: Probability = Field(
        0.0, description="of a worker's allocation of device memory: it fails; drawn anew when a worker is restarted"
    )
    pool_delay_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="every pool operation of prefill takes up to this much longer"
    )
    pool_failure: Probability = Field(0.0, description="probability that a pool operation of prefill fails")
    reuse_gate_off: bool = Field(
        False, description="prefill overwrites layer buffers without waiting for their readers; for proofs only"
    )


class SluiceConfig(Section):
    model: ModelSection
    kv: KvSection = KvSection()
    hostcann: HostcannSection = HostcannSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    transfer: TransferSection = TransferSection()
    pool: PoolSection = PoolSection()
    http: HttpSection = HttpSection()
    grpc: GrpcSection = GrpcSection()
    runtime: RuntimeSection = RuntimeSection()
    ray: RaySection = RaySection()
    security: SecuritySection = SecuritySection()
    faults: FaultsSection = FaultsSection()

    @model_validator(mode="after")
    def _sides_fit(self) -> SluiceConfig:
        p, d, bs = self.prefill, self.decode, self.kv.block_size
        if p.tp % d.tp:
            legal = [t for t in range(1, p.tp + 1) if p.tp % t == 0]
            raise ValueError(f"prefill.tp = {p.tp} must be a multiple of decode.tp = {d.tp}; legal decode.tp: {legal}")
        if d.hot_tokens % bs:
            raise ValueError(f"decode.hot_tokens = {d.hot_tokens} must be a multiple of kv.block_size = {bs}")
        if 1 + d.speculative_tokens > bs:
            raise ValueError(
                f"decode.speculative_tokens = {d.speculative_tokens}: so many and one more must fit "
                f"one block of kv.block_size = {bs}; legal: 0 to {bs - 1}"
            )
        if p.max_tokens_per_step < bs:
            raise ValueError(
                f"prefill.max_tokens_per_step = {p.max_tokens_per_step} must be at least kv.block_size = {bs}"
            )
        if self.transfer.read_timeout_s >= self.transfer.lease_s:
            raise ValueError(
                f"transfer.read_timeout_s = {self.transfer.read_timeout_s} must be below "
                f"transfer.lease_s = {self.transfer.lease_s}"
            )
        if (missing := self.security.missing()) is not None:
            raise ValueError(missing)
        need = self.worker_count
        if self.hostcann.devices is not None and self.hostcann.devices < need:
            raise ValueError(f"hostcann.devices = {self.hostcann.devices}, but the worker processes need {need}")
        return self

    @property
    def worker_count(self) -> int:
        """Worker processes of the deployment = devices needed."""
        return self.prefill.groups * self.prefill.tp + self.decode.groups * self.decode.dp * self.decode.tp

    @property
    def pool_host(self) -> str:
        return self.pool.host or self.runtime.host

    @property
    def model_name(self) -> str:
        return self.model.name or Path(self.model.path).resolve().name

    def prefill_device(self, group: int, tp_rank: int) -> int:
        """Device of a prefill worker: prefill groups come first, then decode groups."""
        return group * self.prefill.tp + tp_rank

    def decode_device(self, group: int, dp_rank: int, tp_rank: int) -> int:
        first = self.prefill.groups * self.prefill.tp
        return first + (group * self.decode.dp + dp_rank) * self.decode.tp + tp_rank


def _set_path(tree: dict[str, Any], dotted: str, value: object) -> None:
    keys = dotted.split(".")
    for depth, key in enumerate(keys[:-1]):
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {dotted}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        tree = child
    tree[keys[-1]] = value


def _explain(error: ValidationError) -> str:
    """One line per field, in terms of the file: not how pydantic names types and the members of a union."""
    lines: dict[str, str] = {}
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"] if "[" not in str(part)) or "config"
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
        if item["type"] == "extra_forbidden":
            lines[path] = f"{path}: unknown key; legal keys: {', '.join(_legal_keys(item['loc'][:-1]))}"
        elif item["type"] == "missing":
            lines[path] = f"{path}: required, but not given"
        elif item["type"] == "model_type":
            lines[path] = (
                f"{path} = {item['input']!r}: must be a section; its keys: {', '.join(_legal_keys(item['loc']))}"
            )
        elif path == "config":
            lines[path] = message
        elif path in lines:
            lines[path] += f", or {message}"
        else:
            lines[path] = f"{path} = {item['input']!r}: {message}"
    return "\n".join(lines.values())


def _legal_keys(path: Sequence[object]) -> list[str]:
    section: type[BaseModel] = SluiceConfig
    for key in path:
        annotation = section.model_fields[str(key)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return sorted(section.model_fields)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> SluiceConfig:
    """Reads a YAML file, applies ``key.path=value`` overrides (values are YAML), validates.

    A relative path of the model or of a file of ``security`` is taken from the file's folder; one in an override from
    the current folder. Raises ConfigError.
    """
    file = Path(path)
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read as YAML: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must be a mapping of sections, not a {type(tree).__name__}")
    for section, fields in {"model": ["path"], "security": SecuritySection.FILES}.items():
        if isinstance(values := tree.get(section), dict):
            for field in fields:
                if isinstance(name := values.get(field), str) and name and not name.startswith(VARIABLE):
                    values[field] = str((file.parent / name).resolve())
    return build_config(tree, overrides)


def build_config(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> SluiceConfig:
    """Validates a tree of sections after ``key.path=value`` overrides. Raises ConfigError."""
    fields = copy.deepcopy(dict(tree))
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set {override!r}: write it as key.path=value")
        try:
            _set_path(fields, key.strip(), parse_yaml(text))
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from None
    try:
        return SluiceConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
