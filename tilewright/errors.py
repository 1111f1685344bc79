"""The errors that Tilewright raises to its users: each names the cause and a remedy. Faults of Tilewright itself become warnings."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class TilewrightError(Exception):
    """Base of every error meant for a user; ``str()`` reads "cause; remedy"."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause, remedy)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}" if self.remedy else self.cause


class UnknownTarget(TilewrightError):
    """The target's name is not in the catalogue."""


class TargetNotPresent(TilewrightError):
    """The operation needs the target machine itself, which is not present."""


class UnknownModel(TilewrightError):
    """The model's name or path leads to no model."""


class UnsupportedOperator(TilewrightError):
    """The model uses operators that the operator table does not have."""


class UnsupportedOption(TilewrightError):
    """An option's value, or a combination of options, is not supported."""


class InvalidInput(TilewrightError):
    """An input tensor has the wrong shape, dtype or device."""


class IndexOutOfRange(TilewrightError, IndexError):
    """An index that a model computed or received is out of range."""

    @classmethod
    def at(cls, place: str, index: int, extent: int) -> IndexOutOfRange:
        """The error for an index in an operator of the user's model, into a dimension of `extent` elements."""
        return cls(f"index {index} is out of range for a dimension of {extent} elements, in {place}", "pass indices of elements that are there")


class InvalidModel(TilewrightError):
    """The model file or module is malformed."""


class InvalidArtifact(TilewrightError):
    """A saved executable is damaged, of another version, or for another machine."""


class ExecutableClosed(TilewrightError):
    """The executable was closed, and then called."""


class ExecutableBusy(TilewrightError):
    """The executable was called, verified or closed during one of its own calls, by a signal handler or a finalizer."""


class CompilerMissing(TilewrightError):
    """No compiler for the target was found, or it lacks the target's architecture."""


class KernelFailed(TilewrightError):
    """A generated kernel did not compile, load or run; ``log_path`` is the compiler's log, if any. ``hung``: a program did not end in time; another
    attempt may succeed."""

    def __init__(self, cause: str, remedy: str = "", log_path: Path | None = None, hung: bool = False) -> None:
        super().__init__(cause, remedy)
        self.log_path = log_path
        self.hung = hung

    def __reduce__(self) -> tuple[type[KernelFailed], tuple[str, str, Path | None, bool]]:
        return type(self), (self.cause, self.remedy, self.log_path, self.hung)


class CacheError(TilewrightError):
    """The kernel cache or a record store cannot be read or written."""


class InternalFault(UserWarning):
    """A fault inside Tilewright, avoided in a simpler way, for example by running a region through PyTorch. Results stay right."""


class NotCompiled(UserWarning):
    """A graph, an operator or a call that runs through PyTorch instead of our kernels. The message has the reason and a remedy; results are right."""


def warn_not_compiled(message: str) -> None:
    """Warns (`NotCompiled`) at the user's line, see `warn_at_users_line`."""
    warn_at_users_line(message, NotCompiled)


def warn_at_users_line(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's program that led here: the innermost one outside this package, PyTorch and Python's library."""
    torch = sys.modules.get("torch")
    folders = [str(Path(module.__file__).parent) + os.sep for module in (sys.modules["tilewright"], torch) if module is not None and module.__file__]
    library, packages = sysconfig.get_path("stdlib") + os.sep, ("site-packages", "dist-packages")

    def ours(file: str) -> bool:
        return file.startswith((*folders, "<frozen")) or (file.startswith(library) and not any(part in file for part in packages))

    frame, level = sys._getframe(1), 2
    while ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def contained(subject: str, instead: str, attempt: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """The attempt's result. If it fails through a fault of ours, warns with the subject, the exception and what is done `instead`, and returns the
    result of `otherwise`, which receives the exception as one line.

    Errors meant for the user and MemoryError pass through."""
    try:
        return attempt()
    except (TilewrightError, MemoryError, InternalFault):  # InternalFault is raised if warnings are errors
        raise
    except Exception as error:
        frame = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if Path(__file__).parent in Path(f.filename).parents), None)
        at = f" in {Path(frame.filename).relative_to(Path(__file__).parent)}:{frame.lineno}" if frame is not None else ""
        said = (str(error).strip().splitlines() or ["without a message"])[0][:300]
        why = f"{type(error).__name__}{at}: {said}"
        warnings.warn(InternalFault(f"{subject}: {instead}, because of a fault inside Tilewright: {why}; please report it"), stacklevel=3)
        return otherwise(why)
