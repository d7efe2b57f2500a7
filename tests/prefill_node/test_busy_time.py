"""Time that several threads take together."""

from __future__ import annotations

import time

from prefill_node.busy_time import BusyTime


def test_time_of_overlapping_work_counts_once():
    busy = BusyTime()
    started = time.monotonic()
    with busy:
        with busy:
            time.sleep(0.02)
        assert busy.seconds == 0.0
        time.sleep(0.02)
    first = busy.seconds
    assert 0.04 <= first <= time.monotonic() - started
    time.sleep(0.02)
    assert busy.seconds == first
    with busy:
        time.sleep(0.02)
    assert first + 0.02 <= busy.seconds <= time.monotonic() - started - 0.02
