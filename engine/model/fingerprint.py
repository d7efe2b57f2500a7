"""Identity of a checkpoint: equal on every node that holds the same files, different when the model differs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engine.model.config_reader import ModelConfigError

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(model_dir: str | Path) -> str:
    """A 32-digit hex hash of config.json and of every safetensors file's header, size and a sample of its bytes.

    It depends on contents only (not on paths or times), so KV saved under it can be shared between hosts. Up to 64
    evenly spaced samples of 4 KiB per file tell fine-tunes of one model apart without reading all weights.

    Raises:
        ModelConfigError: config.json or the weights are missing.
    """
    directory = Path(model_dir)
    weights = sorted(directory.glob("*.safetensors"))
    if not (directory / "config.json").is_file() or not weights:
        raise ModelConfigError(str(directory), "(files)", None, "config.json and *.safetensors")
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for sample in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
