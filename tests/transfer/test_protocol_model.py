"""No order of events lets decode accept bytes that prefill did not mean, as long as every rule is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.protocol_model import Budget, Mutation, Violation, explore


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tens of thousands of worlds would log each of their misfortunes."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("budget", "states"),
    [
        (Budget(layers=2, jumps=1), 400),
        (Budget(layers=2, jumps=1, duplicates=1), 1_000),
        (Budget(layers=2, failures=1, timeouts=1, duplicates=1), 250),
        (Budget(layers=1, jumps=1, failures=1, timeouts=1), 300),
        (Budget(layers=2, jumps=1, failures=1, together=True), 1_000),
        (Budget(layers=2, jumps=1, timeouts=1, together=True), 1_000),
    ],
    ids=str,
)
def test_no_interleaving_yields_an_accepted_wrong_read(budget: Budget, states: int) -> None:
    assert explore(Mutation(), budget) >= states


@pytest.mark.parametrize(
    ("mutation", "budget"),
    [
        (Mutation(generation_check=False), Budget(jumps=1)),
        (Mutation(generation_bump=False), Budget(jumps=1)),
        (Mutation(read_once=False), Budget(duplicates=1)),
    ],
    ids=["without the generation check", "without a new generation", "with batches read twice"],
)
def test_without_one_of_the_rules_a_wrong_read_is_accepted(mutation: Mutation, budget: Budget) -> None:
    with pytest.raises(Violation, match="a wrong read of layer 0 was accepted"):
        explore(mutation, budget)


def test_without_quarantine_a_late_copy_spoils_memory() -> None:
    with pytest.raises(Violation, match=r"wrong read|another request"):
        explore(Mutation(quarantine=False), Budget(timeouts=1))
