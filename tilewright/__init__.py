"""Tilewright: a deep-learning compiler that plans instead of searching.

    executable = tilewright.compile(module, example_inputs)
    outputs = executable(*inputs)

Importing the package is cheap: PyTorch and the compiler are imported when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright import zoo as zoo
    from tilewright.compile import compile as compile
    from tilewright.errors import InternalFault as InternalFault
    from tilewright.errors import NotCompiled as NotCompiled
    from tilewright.errors import TilewrightError as TilewrightError
    from tilewright.runtime.artifact import load as load
    from tilewright.runtime.dynamic import DynamicExecutable as DynamicExecutable
    from tilewright.runtime.executable import Executable as Executable

    __version__: str

_PUBLIC = {
    "DynamicExecutable": ("tilewright.runtime.dynamic", "DynamicExecutable"),
    "Executable": ("tilewright.runtime.executable", "Executable"),
    "InternalFault": ("tilewright.errors", "InternalFault"),
    "NotCompiled": ("tilewright.errors", "NotCompiled"),
    "TilewrightError": ("tilewright.errors", "TilewrightError"),
    "load": ("tilewright.runtime.artifact", "load"),
}
"""Maps a public name to the module that defines it and its name there."""

__all__ = ["DynamicExecutable", "Executable", "InternalFault", "NotCompiled", "TilewrightError", "__version__", "compile", "load", "zoo"]


def __getattr__(name: str) -> Any:
    if name == "zoo":
        return importlib.import_module("tilewright.zoo")
    if name == "__version__":
        from importlib import metadata

        return metadata.version("tilewright")
    if name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package: `tilewright.compile` is the function, although a submodule has that name too. The import system binds an imported submodule in
    its package; the setter ignores this. `from tilewright.compile import ...` still finds the submodule."""

    @property
    def compile(self) -> Any:
        return importlib.import_module("tilewright.compile").compile

    @compile.setter
    def compile(self, value: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
