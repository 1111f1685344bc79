"""Copies of a model's tensors, of which the constants of its graphs are made: one of each for the graphs for several sizes."""

from __future__ import annotations

from threading import Lock
from weakref import WeakValueDictionary

import torch

from tilewright.frontend.tensor_memory import Location, location_of, same_bits


class Copies:
    """Copies of parameters, buffers and constants, which later readings of the same model share. Each lives as long as a graph or program uses it.
    Threads may read a model at the same time."""

    def __init__(self) -> None:
        self._made: WeakValueDictionary[Location, torch.Tensor] = WeakValueDictionary()
        self._lock = Lock()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the CPU, which nothing else changes: the one made of the same memory earlier if it has the same bits, else a new one.
        Bits are compared because a write through `tensor.data` leaves no other trace."""
        current = tensor.detach().cpu().contiguous()
        if not current.numel():  # which has no location
            return current.clone()
        location = location_of(tensor)
        with self._lock:
            made = self._made.get(location)
            if made is None or not same_bits(made, current):
                made = self._made[location] = current.clone()
            return made
