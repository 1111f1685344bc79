"""PyTorch's autocast where a call is made: which types it casts to, and calling without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch


def autocast_types() -> Mapping[str, torch.dtype]:
    """The types that autocast casts to here, by device; empty where it is off."""
    return {device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}


@contextmanager
def autocast(types: Mapping[str, torch.dtype], enabled: bool = True) -> Iterator[None]:
    """Autocast on the devices of `types`, on or off, while this lasts."""
    with ExitStack() as regions:
        for device, dtype in types.items():
            regions.enter_context(torch.autocast(device, dtype, enabled))
        yield
