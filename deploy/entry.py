"""Where the command ``sluice`` begins: nothing is imported before Ctrl-C means a quiet end."""

from __future__ import annotations

import signal


def main() -> None:
    """Imports the command line, which takes a while, and runs it; from then on it answers Ctrl-C itself."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deploy import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()
