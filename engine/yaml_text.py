"""YAML as users write it by hand."""

from __future__ import annotations

from collections.abc import Hashable

import yaml


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping with the same key twice, of which YAML readers silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> object:
    """The one document in `text`, plain values only. Raises yaml.YAMLError: no YAML, or a key is given twice."""
    return yaml.load(text, _UniqueKeys)
