"""Which faults the processes injected into themselves: what they say of it in their logs, over all their lives."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

MESSAGES = "message_drop", "message_delay", "message_duplicate", "message_corrupt", "ack_loss"
_LINE = re.compile(r" WARNING engine\.faults: faults\.(\w+): ")  # see engine.faults.injected


def injected_faults(logs: Path) -> dict[str, Counter[str]]:
    """By process (the name of its log) how often each knob of section `faults` has struck."""
    found = {}
    for log in sorted(logs.glob("*.log")):
        with log.open(encoding="utf-8", errors="replace") as lines:
            counts = Counter(match[1] for line in lines if (match := _LINE.search(line)))
        if counts:
            found[log.stem] = counts
    return found


def of_messages(faults: dict[str, Counter[str]]) -> int:
    """How many messages between prefill and decode ranks were dropped, delayed, doubled, damaged or lost."""
    return sum(counts[knob] for counts in faults.values() for knob in MESSAGES)
