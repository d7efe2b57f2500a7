"""Typed access to the fields of a JSON object, with errors a user can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class ModelConfigError(ValueError):
    """A model directory cannot be served: names the field, the value found (None: it is missing) and what is legal."""

    def __init__(self, source: str, field: str, value: object, legal: str) -> None:
        self.source = source
        self.field = field
        self.value = value
        self.legal = legal
        found = "missing" if value is None else repr(value)
        super().__init__(f"{source}: {field} is {found}; legal: {legal}")


class FieldReader:
    """Reads fields of one JSON object; a missing or null field takes its default, or is an error without one."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def error(self, field: str, value: object, legal: str) -> ModelConfigError:
        """The error for `field` of this object; the caller raises it."""
        return ModelConfigError(self._source, self._prefix + field, value, legal)

    def raw(self, field: str) -> Any:
        """The field as parsed from JSON, None if it is missing."""
        return self._values.get(field)

    def child(self, field: str) -> FieldReader | None:
        """A reader of the nested object `field`; None if it is missing, null or empty."""
        value = self.raw(field)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(field, value, "a JSON object")
        return FieldReader(value, self._source, f"{self._prefix}{field}.")

    def integer(self, field: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = self.raw(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, value, f"an integer of at least {minimum}")
        return value

    def number(self, field: str, default: float | None = None, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        value = self.raw(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            raise self.error(field, value, f"a finite number above {above:g}")
        return float(value)

    def boolean(self, field: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self.raw(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false")
        return value

    def choice(self, field: str, legal: Sequence[T], default: T | None = None) -> T:
        """One of the `legal` values."""
        value = self.raw(field)
        if value is None and default is not None:
            return default
        for candidate in legal:
            if type(value) is type(candidate) and value == candidate:
                return candidate
        raise self.error(field, value, " or ".join(repr(candidate) for candidate in legal))
