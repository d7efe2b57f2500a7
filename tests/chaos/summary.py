"""What several seeds came to, as a table with one column per seed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tests.chaos.faults import of_messages
from tests.chaos.memory import MIB
from tests.chaos.run import Outcome


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Memory is the sum over the processes that lived long, in the middle and at the end of their lives."""
    table = Table("seed", *(str(outcome.seed) for outcome in outcomes), title="make chaos")
    columns = [_column(outcome) for outcome in outcomes]
    for name in columns[0]:
        table.add_row(name, *(str(column[name]) for column in columns))
    return table


def _column(outcome: Outcome) -> dict[str, object]:
    counts = outcome.record.counts
    messages = of_messages(outcome.faults)
    first, last = (sum(sizes) / MIB for sizes in zip((0.0, 0.0), *outcome.memory.values(), strict=True))
    return {
        "minutes": f"{outcome.seconds / 60:g}",
        "requests right": counts["right"],
        "clear errors": _sum(outcome, "error "),
        "cut by the meta server's death": counts["cut"],
        "cancelled": counts["cancelled"],
        "kills": _sum(outcome, "kill "),
        "stops": _sum(outcome, "stop "),
        "restarts": outcome.restarts,
        "message faults": messages,
        "other faults": sum(each.total() for each in outcome.faults.values()) - messages,
        "own memory, MiB": f"{first:.0f} -> {last:.0f}",
        "pools zero": "yes" if outcome.pools_zero else "NO",
        "violations": len(outcome.record.violations),
    }


def _sum(outcome: Outcome, prefix: str) -> int:
    return sum(count for name, count in outcome.record.counts.items() if name.startswith(prefix))
