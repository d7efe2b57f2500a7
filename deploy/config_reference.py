"""Writes docs/configuration.md from the configuration's own types: ``python -m deploy.config_reference``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config import SluiceConfig

FILE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """# Configuration: sluice.yaml

One file describes a deployment and every process reads it. `deploy/configs/local.yaml` is a complete example for one
CPU host; `--set key.path=value` on the command line overrides any field. A wrong key or value is refused at start with
the field's path, the value and what is legal. Sizes may be written as `512MiB`. Settings of MemFabric and MemCache are
derived from these fields. Ports given as 0 are chosen at start.

This page is made from `engine/config.py` by `make docs`.
"""


def reference() -> str:
    """The whole page: one table per section of the file."""
    return "\n".join(
        [_HEAD, *(line for name, field in SluiceConfig.model_fields.items() for line in _section(name, field))]
    )


def _section(name: str, field: FieldInfo) -> Iterator[str]:
    section = field.annotation
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        raise TypeError(f"{name}: every top-level field of the configuration is a section")
    yield f"## {name}\n"
    if section.__doc__ and section.__doc__ != BaseModel.__doc__:
        yield f"{section.__doc__.strip()}\n"
    yield "| field | legal | default | meaning |\n|---|---|---|---|"
    schema = SluiceConfig.model_json_schema()["$defs"]
    properties = schema[section.__name__]["properties"]
    for key, item in section.model_fields.items():
        default = "required" if item.is_required() else f"`{json.dumps(item.default)}`"
        yield f"| `{name}.{key}` | {_legal(properties[key])} | {default} | {item.description or ''} |"
    yield ""


def _legal(schema: dict[str, object]) -> str:
    """What JSON schema says of a value, in words."""
    options = schema.get("anyOf")
    if isinstance(options, list):
        return " or ".join(_legal(option) for option in options)
    if "const" in schema:
        return f"`{schema['const']}`"
    choices = schema.get("enum")
    if isinstance(choices, list):
        return ", ".join(f"`{choice}`" for choice in choices)
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {_legal(items)}" if isinstance(items, dict) else "list"
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        return f"mapping of text to {_legal(values)}"
    names = {"null": "empty", "string": "text", "boolean": "`true`, `false`", "integer": "integer", "number": "number"}
    text = names[str(schema["type"])]
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    return " ".join([text, ", ".join(limits)]) if limits else text


def main() -> None:
    """Writes the page; with --check, exits with 1 if the page on disk is another one."""
    if "--check" in sys.argv[1:]:
        sys.exit(0 if FILE.read_text(encoding="utf-8") == reference() else f"{FILE} is not current; run: make docs")
    FILE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
