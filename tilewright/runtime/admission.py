"""The inputs of a call: tensors that kernels can read in place are passed on, others are copied, or refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from tilewright.errors import InvalidInput
from tilewright.frontend.tensor_memory import address_of, is_nowhere
from tilewright.runtime.packing import torch_dtype
from tilewright.runtime.signature import Signature, described


@dataclass(frozen=True)
class Admission:
    """What the inputs of an executable have to be.

    `sources`: for each input of the graph the number of the caller's input, or, below zero, -1 - the number of one of `states`, the module's own
    buffers. `expected`: its shape and type. `device` and `alignment` (bytes): where kernels can read it in place."""

    signature: Signature
    sources: tuple[int, ...]
    expected: tuple[tuple[torch.Size, torch.dtype], ...]
    states: tuple[torch.Tensor, ...]
    device: torch.device
    alignment: int

    @cached_property
    def has_constants(self) -> bool:
        """Whether the caller's inputs include values for which the model was compiled."""
        return not all(leaf.name for leaf in self.signature.inputs)

    @cached_property
    def has_strides(self) -> bool:
        """Whether the model depends on strides of the caller's inputs."""
        return any(leaf.strides is not None for leaf in self.signature.inputs)

    @cached_property
    def writes(self) -> bool:
        """Whether calls change inputs or states."""
        return bool(self.signature.mutations or self.states)

    def admit(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The graph's inputs in order: the caller's tensors if the kernels can read them in place, else copies.

        Raises:
            InvalidInput: for any other tensor or value than the model was compiled for, and what PyTorch would not write.
        """
        device, alignment = self.device, self.alignment
        inputs = []
        grad = torch.is_grad_enabled()
        if getattr(forward_ad, "_current_level", -1) >= 0:
            self._check_tangents(leaves)
        if self.has_constants:
            self._check_constants(leaves)
        if self.writes:
            self._check_written(leaves)
        if self.has_strides:
            self._check_strides(leaves)
        for source, (shape, dtype) in zip(self.sources, self.expected, strict=True):
            tensor = leaves[source] if source >= 0 else self.states[-1 - source]
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.shape == shape
                and tensor.dtype is dtype
                and tensor.device == device
                and tensor.layout is torch.strided
                and not (grad and tensor.requires_grad)
            ):
                if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj() or (alignment > 1 and address_of(tensor) % alignment):
                    self._require_memory(source, tensor)
                    tensor = torch.empty(shape, dtype=dtype, device=device).copy_(tensor.detach())
                inputs.append(tensor)
            else:
                self._refuse(source, tensor)
        return inputs

    def addresses(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
        """Addresses of the graph's inputs and of the results."""
        try:
            addresses = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
        except RuntimeError:  # for some tensors PyTorch raises this instead of returning 0
            addresses = [0]
        if 0 in addresses:
            for source, tensor in zip(self.sources, inputs, strict=True):
                self._require_memory(source, tensor)
            if any(map(is_nowhere, outputs)):
                raise InvalidInput("the mode in which it is called makes tensors without memory for the results", "call outside of it")
        return addresses

    def _require_memory(self, source: int, tensor: torch.Tensor) -> None:
        if is_nowhere(tensor):
            name = f"input {self.signature.inputs[source].place}" if source >= 0 else f"the buffer {self.signature.states[-1 - source].name}"
            kind = f" ({type(tensor).__name__})"
            raise InvalidInput(f"{name} has no memory that kernels could read: {described(tensor)}{kind}", "pass a tensor that holds its elements")

    def _check_tangents(self, leaves: Sequence[Any]) -> None:
        """Rejects inputs with forward-mode tangents, so that no derivative is silently lost."""
        for leaf, tensor in zip(self.signature.inputs, leaves, strict=True):
            if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise InvalidInput(f"input {leaf.place} has a tangent, and compiled models compute no derivatives", "pass its primal")

    def _check_constants(self, leaves: Sequence[Any]) -> None:
        for leaf, value in zip(self.signature.inputs, leaves, strict=True):
            if not leaf.name and not leaf.admits(value):
                found = described(value)
                if leaf.dtype and isinstance(value, torch.Tensor) and not is_nowhere(value) and value.numel() <= len(leaf.constant):
                    found += f" with the elements {value.flatten().tolist()}"
                wanted = f"compiled for the constant {leaf.expected()}"
                raise InvalidInput(f"input {leaf.place}: {wanted}, got {found}", "compile the model for this value")

    def _check_strides(self, leaves: Sequence[Any]) -> None:
        for leaf, value in zip(self.signature.inputs, leaves, strict=True):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and tuple(value.shape) == leaf.shape and not leaf.lies_as(value):
                at = "" if leaf.offset is None else f" and the storage offset {leaf.offset}"
                got = f"strides {value.stride()}" + ("" if leaf.offset is None else f" and {value.storage_offset()}")
                wanted = f"compiled for the strides {leaf.strides}{at}, on which as_strided depends"
                raise InvalidInput(f"input {leaf.place}: {wanted}, got {got}", "pass a tensor with these strides, or compile the model for this one")

    def _check_written(self, leaves: Sequence[Any]) -> None:
        """Rejects inputs that share memory with an input or module buffer that the model writes: the model was compiled for separate inputs, and
        would not see the change. Also rejects, before anything is written, what PyTorch would not write."""
        places = [leaf.place for leaf in self.signature.inputs]
        spans = [_span(x) for x in leaves]
        written = [(f"input {places[leaf]}", leaf, leaves[leaf], spans[leaf]) for leaf, _ in self.signature.mutations]
        written += [(f"the buffer {state.name}", -1, x, _span(x)) for state, x in zip(self.signature.states, self.states, strict=True)]
        for name, leaf, tensor, (first, last) in written:
            for other, (start, end) in enumerate(spans):
                if other != leaf and start < last and first < end:
                    raise InvalidInput(f"{name} and input {places[other]} share memory, and the model writes to {name}", "pass a copy")
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
                raise InvalidInput(f"the model writes to {name}, of which several elements lie in the same memory", "pass a copy")
            if tensor.is_inference() and not torch.is_inference_mode_enabled():
                raise InvalidInput(f"the model writes to {name}, an inference tensor", "call under torch.inference_mode(), or pass a copy")

    def _refuse(self, source: int, value: Any) -> None:
        if source < 0:
            name = self.signature.states[-1 - source].name
            raise InvalidInput(f"the module's buffer {name} is now {described(value)}", "compile the module again")
        spec = self.signature.inputs[source]
        expected = f"a {str(torch_dtype(spec.dtype)).removeprefix('torch.')} tensor of shape {list(spec.shape)} on {self.device}"
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise InvalidInput(
                f"input {spec.place} requires gradients, and compiled models compute none",
                "call under torch.no_grad(), or pass a detached tensor",
            )
        remedy = "pass torch.from_numpy(array)" if isinstance(value, np.ndarray) else "compile the model for such inputs"
        raise InvalidInput(f"input {spec.place}: expected {expected}, got {described(value)}", remedy)


def _span(value: Any) -> tuple[int, int]:
    """The address range (first byte, end) of the storage of a tensor. It also finds overlaps between several storages over the same array."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.numel():
        return 0, 0
    try:
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # the tensor has no storage
        return 0, 0
