"""What the sections of ``sluice.yaml`` are made of: types of fields with their legal ranges, and the sections' base."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(value: object) -> object:
    """``"64MiB"`` -> 67108864; anything that is not such a string is returned as it is."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", value.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number of bytes or a number with KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _UNITS[match[2]])


def switch(value: object) -> object:
    """YAML reads a bare `on` as true."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def lower(value: object) -> object:
    """For words whose case says nothing."""
    return value.strip().lower() if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Unknown keys are refused, values are not converted, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
