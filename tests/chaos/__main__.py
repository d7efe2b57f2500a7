"""``make chaos SEED=n SEEDS=k MINUTES=m``: k seeds from n on; see run.py for what is done, summary.py for what is told.

Exits with status 1, after the log of events, if anything happened that must not: a wrong token, a request without an
end, a connection that broke for no reason, a pool that is not empty, memory that grows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tests.chaos.questions import passkey_questions
from tests.chaos.run import Outcome, run
from tests.chaos.summary import table_of
from tests.checkpoints import PASSKEY_GLM

LOGS = Path(__file__).resolve().parents[2] / "build" / "chaos"
SUMMARY = LOGS / "summary.txt"
FAULTS: dict[str, object] = {
    "faults.message_drop": 0.002,
    "faults.message_delay": 0.01,
    "faults.message_duplicate": 0.01,
    "faults.message_corrupt": 0.002,
    "faults.ack_loss": 0.002,
    "faults.read_failure": 0.005,
    "faults.stall": 0.005,
    "faults.pool_failure": 0.01,
}
"""Of every message, read, step and pool operation; see FaultsSection in engine/config.py."""


def tell(outcome: Outcome, console: Console) -> None:
    """What happened with one seed; if anything did that must not, after all that came before it."""
    if outcome.failed:
        console.print("\n".join(outcome.record.events), markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(outcome.record.counts.items()))
    verdict = f"{len(outcome.record.violations)} violations" if outcome.failed else "no violation"
    console.print(f"seed {outcome.seed}, {outcome.seconds:.0f} s: {counts}: {verdict}", markup=False, soft_wrap=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of disturbance per seed (default: %(default)s)")
    parser.add_argument("--no-message-faults", action="store_true", help="only kill, stop and cancel")
    arguments = parser.parse_args()
    console = Console()
    console.print("the oracle answers ...")
    questions = passkey_questions(PASSKEY_GLM)
    outcomes: list[Outcome] = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        log, faults = LOGS / f"seed-{seed}.log", {} if arguments.no_message_faults else FAULTS
        outcomes.append(run(seed, 60 * arguments.minutes, questions, faults, log))
        tell(outcomes[-1], console)
    table = table_of(outcomes)
    console.print(table)
    with SUMMARY.open("w", encoding="utf-8") as file:
        Console(file=file, width=120).print(table)
    console.print(f"written to {SUMMARY}; events and logs of each seed beside it", soft_wrap=True)
    if failed := [outcome.seed for outcome in outcomes if outcome.failed]:
        sys.exit(f"chaos: failed with seeds {failed}")


if __name__ == "__main__":
    main()
