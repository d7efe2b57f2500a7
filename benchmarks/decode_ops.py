"""``make bench-decode``: each decode operator, and a whole decode step, against what they replace, at real dimensions.

Writes benchmarks/results/decode_ops.json, a list of rows {name, value, unit, baseline, ratio, goal, met, spread, note}.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console

from benchmarks import ops_copy, ops_lim, ops_residency, ops_selection, ops_step
from benchmarks.harness import clock, publish
from engine.ops import available_isas, set_num_threads

PARTS = ("lim", "selection", "copy", "residency", "step")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads per operator call (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each comparison (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to run (default: all)")
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.seconds <= 0:
        sys.exit("decode_ops: --threads must be 1 or more and --seconds above 0")
    torch.set_num_threads(arguments.threads)
    set_num_threads(arguments.threads)
    console, budget = Console(), arguments.seconds
    console.print(f"instruction sets: {', '.join(available_isas())}; threads: {arguments.threads}")
    now = clock(arguments.threads)
    rows, gemm, memcpy = ops_copy.machine_rates(now, budget)
    if "lim" in arguments.only:
        rows += ops_lim.run(now, budget, gemm)
    if "selection" in arguments.only:
        rows += ops_selection.run(now, budget)
    if "copy" in arguments.only:
        rows += ops_copy.run(now, budget, gemm, memcpy)
    if "residency" in arguments.only:
        rows += ops_residency.run(now, budget / 2)
    if "step" in arguments.only:
        rows += ops_step.run(now, 2 * budget)
    path = publish(rows, "decode_ops.json", console)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
