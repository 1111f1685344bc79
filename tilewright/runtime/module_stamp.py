"""Whether a module's parameters and buffers are still those that it was compiled with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class ModuleStamp:
    """Identity and version of a module's parameters and buffers at compilation."""

    entries: Mapping[str, tuple[Callable[[], torch.Tensor | None], int, int]]

    changing: frozenset[str] = frozenset()
    """Names of buffers that calls themselves change: only their identity is compared."""

    @staticmethod
    def of(module: torch.nn.Module, changing: Iterable[str] = ()) -> ModuleStamp:
        names = frozenset(changing)
        entries = {
            name: (weakref.ref(tensor), tensor.data_ptr(), 0 if name in names else _version(tensor)) for name, tensor in _state(module).items()
        }
        return ModuleStamp(MappingProxyType(entries), names)

    def differs(self, module: torch.nn.Module) -> bool:
        state = _state(module)
        if state.keys() != self.entries.keys():
            return True
        return any(
            self.entries[name][0]() is not tensor or self.entries[name][1:] != (tensor.data_ptr(), 0 if name in self.changing else _version(tensor))
            for name, tensor in state.items()
        )


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
