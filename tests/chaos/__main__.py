"""``make chaos SEED=n MINUTES=m``: seeds n, n+1, ... of chaos; see run.py for what is done, record.py for what is told.

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
from tests.checkpoints import PASSKEY_GLM

LOGS = Path(__file__).resolve().parents[2] / "build" / "chaos"
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


def summary(outcome: Outcome, console: Console) -> None:
    """One screen."""
    record = outcome.record
    counts = ", ".join(f"{name} {count}" for name, count in sorted(record.counts.items()))
    console.print(f"seed {outcome.seed}, {outcome.seconds:.0f} s: {counts}", markup=False, soft_wrap=True)
    for line in outcome.memory:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    verdict = f"{len(record.violations)} violations" if outcome.failed else "no violation"
    console.print(f"seed {outcome.seed}: {verdict}", markup=False)


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
    failed = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        log, faults = LOGS / f"seed-{seed}.log", {} if arguments.no_message_faults else FAULTS
        outcome = run(seed, 60 * arguments.minutes, questions, faults, log)
        if outcome.failed:
            failed.append(seed)
            console.print(log.read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True)
        summary(outcome, console)
    if failed:
        sys.exit(f"chaos: failed with seeds {failed}")


if __name__ == "__main__":
    main()
