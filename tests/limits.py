"""A limit of time against hangs: far above what anything takes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in what takes longer; in the main thread alone."""

    def over(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
