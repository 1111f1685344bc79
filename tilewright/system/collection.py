"""Python's collector of reference cycles, paused where many objects are made, few of which form any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class Frozen:
    """Whether the process was ever seen to hold frozen objects. Python counts them one by one, which takes longer than planning a small model where
    there are millions of them, so once there are any they are not counted again."""

    def __init__(self) -> None:
        self._seen = False

    def __bool__(self) -> bool:
        self._seen = self._seen or gc.get_freeze_count() > 0
        return self._seen


_FROZEN = Frozen()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the process's collector for a second or so. As long as objects are added it looks at all of them again and again, also at those of
    PyTorch and of the model, which takes up to a quarter of the time of an export or of planning. Afterwards it runs if it ran before, and what was
    made counts as old, so that it is looked at when the collector next looks at everything. Of blocks that overlap in several threads the first to
    end may let it run."""
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs and not _FROZEN:  # nothing that the process froze would be thawed
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if runs:
            gc.enable()
