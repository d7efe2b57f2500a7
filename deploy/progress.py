"""What the user sees while a deployment loads: a live table on a terminal, one line per change elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table


class Progress:
    """Shows one line of text per process. `update` is cheap and may be called often."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._started = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal may have gone
                self._live.stop()

    def update(self, name: str, state: str) -> None:
        """Says what process `name` is doing now."""
        if self._states.get(name) == state:
            return
        self._states[name] = state
        with suppress(OSError):  # the terminal may have gone, of which a signal tells
            self._show(name, state)

    def _show(self, name: str, state: str) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            elapsed = time.monotonic() - self._started
            self._console.print(f"[{elapsed:6.1f}s] {name}: {state}", markup=False, soft_wrap=True)

    def waiting(self) -> list[tuple[str, str]]:
        """The processes that are not ready, with their last state."""
        return [(name, state) for name, state in self._states.items() if state != "ready"]

    def waiting_for(self) -> str:
        """The same, as one line of an error message."""
        return "; ".join(f"{name}: {state}" for name, state in self.waiting())

    def _table(self) -> Table:
        title = f"starting ({time.monotonic() - self._started:.0f} s)"
        table = Table("process", "state", title=title, title_justify="left")
        for name, state in self._states.items():
            table.add_row(name, f"[green]{state}[/]" if state == "ready" else state)
        return table
