"""What a model check puts in the place of time, locks and chance."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class Seen(BaseException):
    """This state was reached before, on another way."""


class Blocked(Exception):
    """The call would wait here."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time passes by jumps only."""


class Anything:
    """Whatever is asked of it."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *arguments: object) -> Anything:
        return self


class Condition:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def notify_all(self) -> None: ...
    def wait(self, timeout: float | None = None) -> None:
        raise Blocked


class Chooser:
    """Takes the given choices, then always the first option; refuses to go on from a known state."""

    def __init__(self, prefix: Sequence[int], seen: set[Hashable]) -> None:
        self.taken: list[tuple[int, int]] = []
        self._prefix = prefix
        self._seen = seen

    def choose(self, options: int, state: Hashable) -> int:
        at = len(self.taken)
        if at < len(self._prefix):
            self.taken.append((self._prefix[at], options))
            return self._prefix[at]
        if state in self._seen:
            raise Seen
        self._seen.add(state)
        self.taken.append((0, options))
        return 0
