"""Reading untrusted files within limits, and writing files whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tilewright.errors import InvalidInput, TilewrightError, UnsupportedOption

MOST_LINE_BYTES, MOST_BYTES = 1 << 26, 1 << 32
"""Maximum bytes of one line and of a whole file of lines, decompressed: longer ones are attempts to exhaust memory."""


@contextmanager
def reading(path: str | Path, kind: type[TilewrightError] = InvalidInput, remedy: str = "give another file") -> Iterator[None]:
    """Turns an exception in the block into an error of this kind, in one line, that names the file; our own errors pass unchanged."""
    try:
        yield
    except TilewrightError:
        raise
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror or error}", remedy) from error
    except ValueError as error:
        raise kind(f"{path} cannot be read: {first_line(error)}", remedy) from error
    except Exception as error:
        raise kind(f"{path} cannot be read: unexpected {type(error).__name__}: {first_line(error)}", remedy) from error


def first_line(error: BaseException) -> str:
    """An exception's message, in one line."""
    return (str(error).strip() or "no message").splitlines()[0]


def json_of(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: for any other text, and for JSON that is nested too deeply or contains what our files never do: NaN, numbers beyond the range of
        float64, integers of thousands of digits, unpaired surrogates, two fields of one name.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\u" in text if isinstance(text, str) else b"\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair") from None
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is beyond the numbers of float64")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two fields of one name")
    return found


def regular(path: str | Path) -> None:
    """Raises OSError for anything but an existing regular file: reading a pipe or device might never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}")


def content_of(path: str | Path) -> bytes:
    """All bytes of a file. Raises OSError if it cannot be read, ValueError if it is longer than MOST_LINE_BYTES."""
    regular(path)
    with open(path, "rb") as file:
        content = file.read(MOST_LINE_BYTES + 1)
    if len(content) > MOST_LINE_BYTES:
        raise ValueError(f"more than {MOST_LINE_BYTES} bytes")
    return content


def lines_of(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1; a gzip file is decompressed.

    Raises:
        OSError, ValueError: if the file cannot be read, is damaged, or has more than MOST_LINE_BYTES in a line or MOST_BYTES in all.
    """
    regular(path)
    number = total = 0
    with open(path, "rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) if packed else raw as file:
            try:
                while line := file.readline(MOST_LINE_BYTES + 1):
                    number, total = number + 1, total + len(line)
                    if len(line) > MOST_LINE_BYTES or total > MOST_BYTES:
                        raise ValueError(f"more than {MOST_LINE_BYTES} bytes in a line, or {MOST_BYTES} in all")
                    yield number, line
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"damaged after line {number}: {error}") from error


@contextmanager
def written(path: str | Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """A file to write that replaces the path when the block ends, and leaves nothing if the block fails."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, mode, **options) as file:
            yield file
        os.chmod(partial, _mode_of(target))
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _mode_of(target: Path) -> int:
    """Permissions of the file that is replaced, or those of a new file."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def check_output(path: str | Path, *inputs: str | Path | None) -> None:
    """Rejects at once an output that could not be written after a long computation, or that would replace an input.

    Raises:
        UnsupportedOption: for a directory, anything else that is not a regular file, an input, or a folder that cannot be made or written.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            raise UnsupportedOption(f"{target} is {'a directory' if target.is_dir() else 'no regular file'}", "name a file to write")
        for other in inputs:
            if other is not None and Path(other).exists() and target.exists() and os.path.samefile(other, target):
                raise UnsupportedOption(f"{target} is read by the same command", "write to another file")
    except OSError as error:
        raise UnsupportedOption(f"{target} cannot be written: {error.strerror or error}", "name another file") from error
    check_place(target)


def check_place(path: str | Path) -> None:
    """Raises UnsupportedOption if nothing can be written at a path because of its folder."""
    target = Path(path)
    try:
        place = next(folder for folder in target.absolute().parents if folder.exists())
    except OSError as error:
        raise UnsupportedOption(f"{target} cannot be written: {error.strerror or error}", "name another file") from error
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UnsupportedOption(f"{target} cannot be written: {place} is no folder that you may write to", "name another file")
