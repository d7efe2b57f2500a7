"""Which layers run their own lightning indexer, and which reuse an earlier layer's top-k (GLM-5.2)."""

from __future__ import annotations

from engine.model.config_reader import FieldReader

_NAMES = {"F": True, "full": True, "S": False, "shared": False}


def read_index_owners(config: FieldReader, num_layers: int) -> tuple[int, ...]:
    """For each layer the index of the layer whose top-k it attends to: itself where it has its own indexer.

    The first field present decides: `indexer_types` (a list of "full" / "shared"), `index_topk_pattern` ("FSSF" or
    such a list), `index_topk_freq` with `index_skip_topk_offset` (layer i is full iff
    max(i - offset + 1, 0) % freq == 0). Entries past `num_layers` belong to the multi-token-prediction layers.

    Raises:
        ModelConfigError: for an unknown entry, too short a list, or a first layer without an indexer.
    """
    for field in ("indexer_types", "index_topk_pattern"):
        value = config.raw(field)
        if value is not None:
            full = _read_pattern(config, field, value, num_layers)
            break
    else:
        field = "index_skip_topk_offset"
        frequency = config.integer("index_topk_freq", 1, minimum=0) or 1
        offset = config.integer("index_skip_topk_offset", 2, minimum=0)
        full = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers)]
    if not full[0]:
        raise config.error(field, config.raw(field), "a first layer that is full: it has no earlier top-k to share")
    owners: list[int] = []
    for layer, is_full in enumerate(full):
        owners.append(layer if is_full else owners[-1])
    return tuple(owners)


def _read_pattern(config: FieldReader, field: str, value: object, num_layers: int) -> list[bool]:
    legal = f'at least {num_layers} entries (one per layer), each "full" / "F" or "shared" / "S"'
    if not isinstance(value, str | list) or len(value) < num_layers:
        raise config.error(field, value, legal)
    full: list[bool] = []
    for entry in value[:num_layers]:
        if not isinstance(entry, str) or entry not in _NAMES:
            raise config.error(field, value, legal)
        full.append(_NAMES[entry])
    return full
