"""``python -m tilewright``, and the installed program: the command line, which signals end cleanly from its first import on."""

from __future__ import annotations

import sys

from tilewright.system.interruption import WORDS, Interruption


def run() -> int:
    """Runs the command in this process's arguments; returns its exit code."""
    interruption = Interruption()
    try:
        interruption.install()
        from tilewright.cli import main

        code = main()
        interruption.leave()
    except KeyboardInterrupt:
        code = 130
        print(WORDS, file=sys.stderr)
        interruption.leave()
    return interruption.code or code


if __name__ == "__main__":
    sys.exit(run())
