"""The file of ``tilewright calibrate``: one for each identified machine (`Machine.identity`), private to its user, with a hash of itself.

It is JSON. A file never serves another machine, since it is named by the digest of what was identified. A damaged file is an error rather than
ignored, because plans would change with it.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tilewright import settings
from tilewright.errors import CacheError
from tilewright.files import first_line, json_of
from tilewright.hardware.machine import Machine
from tilewright.system.private_files import NotPrivate, read_private, write_private


@dataclass(frozen=True)
class Content:
    """What every file holds besides its hash."""

    version: ClassVar[int]
    """Of the format."""
    identity: str
    """The digest of the machine as identified."""
    machine: str
    """Its description."""

    @property
    def document(self) -> dict[str, Any]:
        """The content as JSON, with the version."""
        return {"version": self.version, **asdict(self)}

    @property
    def digest(self) -> str:
        """The SHA-256 of the content, 64 hexadecimal digits."""
        return digest_of(self.document)

    @property
    def name(self) -> str:
        """The digest as sources, plans and reports name it."""
        return self.digest[:12]


T = TypeVar("T", bound=Content)


def place(machine: Machine) -> Path:
    """The file of an identified machine, which need not exist."""
    return settings.cache_directory() / "calibration" / f"{machine.identity}.json"


def remedy_of(machine: Machine) -> str:
    """What to do about a file that does not serve."""
    command = f"tilewright calibrate{f' --target {machine.name}' if machine.is_gpu else ''}"
    return f"run `{command}` again, or `{command} --remove`"


def digest_of(content: Mapping[str, Any]) -> str:
    """The SHA-256 of a file's content without its hash, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps({name: value for name, value in content.items() if name != "sha256"}, sort_keys=True).encode()).hexdigest()


def read(machine: Machine, version: int, checked: Callable[[dict[str, Any]], T]) -> T | None:
    """What `checked` makes of the content without version and hash; None if there is none, or, with a warning, if another user may have written it.

    Raises:
        CacheError: if the file cannot be read, is damaged, or is from another machine or release; for each exception ValueError, KeyError, TypeError
            and AttributeError of `checked`.
    """
    path = place(machine)
    try:
        content = json_of(read_private(path, path.parent))
        if content["version"] != version:
            raise ValueError("another release of Tilewright wrote it")
        if digest_of(content) != content["sha256"]:
            raise ValueError("its SHA-256 is not the one that it states")
        if content["identity"] != machine.identity:
            raise ValueError(f"it is of the machine {content['identity']}")
        return checked({name: value for name, value in content.items() if name not in ("version", "sha256")})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except NotPrivate as error:
        warnings.warn(f"the calibration {path} is not used: {error}; make it yours alone, or remove it", stacklevel=2)
        return None
    except OSError as error:
        raise CacheError(f"the calibration {path} cannot be read: {error.strerror or error}", remedy_of(machine)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"the calibration {path} is damaged or not of this machine: {first_line(error)}", remedy_of(machine)) from error


def store(content: Content, machine: Machine) -> Path:
    """Writes the machine's file, replacing an earlier one; returns its path. Raises CacheError if it cannot be written."""
    path = place(machine)
    try:
        write_private(path, json.dumps({**content.document, "sha256": content.digest}, indent=1).encode() + b"\n")
    except OSError as error:
        raise CacheError(f"the calibration {path} cannot be written: {error.strerror or error}", "set TILEWRIGHT_CACHE to another folder") from error
    return path


def remove(machine: Machine) -> Path | None:
    """Removes the machine's file, whatever is in it; returns its path, or None if there was none. Raises CacheError if it cannot be removed."""
    path = place(machine)
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(f"the calibration {path} cannot be removed: {error.strerror or error}", "check the permissions of its folder") from error
    return path
