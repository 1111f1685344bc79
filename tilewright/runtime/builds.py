"""Values that one thread makes in the background, those requested last first."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Build(Generic[Made]):
    """One value: `made`, or the `error` that making it raised, once `done` is set. Neither if it was given up."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.made: Made | None = None
        self.error: Exception | None = None


class GivenUp(BaseException):
    """Ends what is being made. No part of it may take this for a fault of its own."""


class Builds(Generic[Key, Made]):
    """Makes values by `make`, one after another. At most `most` wait; of more, those that were requested first are given up. Nothing is begun before
    `rest` seconds without requests."""

    def __init__(self, make: Callable[[Key], Made], most: int, rest: float = 0.0) -> None:
        self._make = make
        self._most = most
        self._rest = rest
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._begins = 0.0
        self._runs = False
        self._waiting: OrderedDict[Key, Build[Made]] = OrderedDict()
        self._current: tuple[Key, Build[Made]] | None = None
        self._closed = False
        self.seconds = 0.0
        """What the last one took."""
        _EVERY.add(self)

    def request(self, key: Key) -> Build[Made]:
        """The build of a key, begun unless it is under way. Every request of it until it is done gives the same one."""
        with self._lock:
            if self._current is not None and self._current[0] == key:
                return self._current[1]
            build = self._waiting.setdefault(key, Build())
            self._waiting.move_to_end(key)
            if self._closed:
                self._waiting.clear()
                build.done.set()
                return build
            while len(self._waiting) > self._most:
                self._waiting.popitem(last=False)[1].done.set()
            self._begins = time.monotonic() + self._rest
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="tilewright builds", daemon=True).start()
            return build

    def _next(self) -> tuple[Key, Build[Made]] | None:
        """What is to be made now, as soon as nothing was requested for a while; None if nothing is left."""
        with self._lock:
            while self._waiting and (left := self._begins - time.monotonic()) > 0:
                self._changed.wait(left)
            self._current = self._waiting.popitem() if self._waiting else None
            self._runs = self._current is not None
            self._changed.notify_all()
            return self._current

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            key, build = taken
            start = time.perf_counter()
            try:
                build.made = self._make(key)
            except GivenUp:
                pass
            except Exception as error:
                build.error = error
            self.seconds = time.perf_counter() - start
            with self._lock:
                self._current = None
            build.done.set()

    def check(self, *_: object) -> None:
        """For what is being made, to call now and then. Raises GivenUp if it was closed."""
        if self._closed:
            raise GivenUp

    def close(self) -> None:
        """Gives up what waits; what is being made is finished, unless it checks."""
        with self._lock:
            self._closed = True
            for build in self._waiting.values():
                build.done.set()
            self._waiting.clear()
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns when nothing is being made or waits."""
        with self._lock:
            while self._runs:
                self._changed.wait()

    def finish(self) -> None:
        """Closes, and returns when nothing is being made."""
        self.close()
        current = self._current
        if current is not None:
            current[1].done.wait()


_EVERY: weakref.WeakSet[Builds[Any, Any]] = weakref.WeakSet()


def wait_for_all() -> None:
    """Returns when nothing is being made in the background of this process."""
    for builds in list(_EVERY):
        builds.wait()


def _finish_all() -> None:
    """At the end of the process, while builds can still start threads, and before those that run are stopped in the middle of foreign code."""
    for builds in list(_EVERY):
        builds.finish()


# functions of `atexit` are called only after the executors of `concurrent.futures` are shut down, which uses this too
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
