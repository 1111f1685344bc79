"""A time limit against hangs, far above any running time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer; in the main thread only."""

    def over(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
