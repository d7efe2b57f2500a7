"""The checkpoint a configuration names, and the configuration a checkpoint implies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.config import ConfigError, SluiceConfig, build_config
from engine.config_check import served_model
from engine.model.config import ModelConfig
from engine.model.config_reader import ModelConfigError
from engine.model.weight_files import CheckpointError, check_weight_files


def checkpoint_of(config: SluiceConfig) -> ModelConfig:
    """The model at `model.path`, as it is to be served. Raises ConfigError when there is none that can be."""
    try:
        return served_model(config)
    except ModelConfigError as error:
        raise ConfigError(f"model.path: {error}") from None


def check_weights(config: SluiceConfig) -> None:
    """Are the weights at `model.path` there, and whole? Reads headers only. Raises ConfigError."""
    try:
        check_weight_files(Path(config.model.path))
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from None


def default_config(model_dir: Path, overrides: Sequence[str]) -> SluiceConfig:
    """The defaults of every field, in the checkpoint's own dtype, after ``key.path=value`` overrides."""
    plain = build_config({"model": {"path": str(model_dir)}})
    dtype = checkpoint_of(plain).dtype
    served = dtype if dtype in ("float32", "bfloat16") else "bfloat16"
    return build_config({"model": {"path": str(model_dir), "dtype": served}}, overrides)
