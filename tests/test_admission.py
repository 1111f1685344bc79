"""Inputs of a call: which are accepted, and what is said of the others."""

from __future__ import annotations

import pytest
import torch

from tests.runtime_programs import ProgramBuilder, chain, chain_reference
from tilewright.errors import InvalidInput
from tilewright.runtime.signature import Signature


def test_inputs_in_any_strides() -> None:
    builder = chain()
    exe = builder.executable(("r4",))
    w = builder.constants["w"]
    storage = torch.randn(200)
    for x in (
        torch.randn(7, 6).t(),
        torch.randn(12, 14)[::2, ::2],
        storage[3:45].view(6, 7),
        torch.randn(1, 7).expand(6, 7),
    ):
        torch.testing.assert_close(exe(x), chain_reference(x, w))


def test_zero_sized_inputs() -> None:
    builder = ProgramBuilder({"x": (0, 4)})
    builder.kernel("relu", ("x",), "y", (0, 4), "(void)x0; (void)y;")
    result = builder.executable(("y",))(torch.empty(0, 4))
    assert result.shape == (0, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["expected 1 positional", "got 0"]),
        ((torch.zeros(6, 7), torch.zeros(1)), ["expected 1 positional", "got 2"]),
        ((torch.zeros(7, 6),), ["args[0]", "[6, 7]", "[7, 6]"]),
        ((torch.zeros(6, 7, dtype=torch.float64),), ["args[0]", "float32", "float64"]),
        ((torch.zeros(6, 7, device="meta"),), ["args[0]", "cpu", "meta"]),
        ((torch.zeros(6, 7).to_sparse(),), ["args[0]", "sparse"]),
        ((3,), ["args[0]", "3", "int"]),
        ((None,), ["args[0]", "None"]),
        ((torch.zeros(6, 7, requires_grad=True),), ["args[0]", "no_grad"]),
    ],
)
def test_wrong_inputs_are_named(arguments: tuple[object, ...], words: list[str]) -> None:
    exe = chain(1).executable(("r0",))
    with pytest.raises(InvalidInput) as caught:
        exe(*arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_keyword_is_named_and_parameters_may_be_keywords() -> None:
    builder = chain(1)
    plain = builder.signature(1)
    signature = Signature(plain.inputs, plain.input_tree, plain.outputs, plain.output_tree, parameters=("image",))
    exe = builder.executable(("r0",), signature)
    x = torch.randn(6, 7)
    assert torch.equal(exe(image=x), exe(x))
    with pytest.raises(InvalidInput, match="nonsense"):
        exe(x, nonsense=1)


def test_gradients_are_refused_only_where_they_would_be_lost() -> None:
    exe = chain(1).executable(("r0",))
    x = torch.randn(6, 7, requires_grad=True)
    with torch.no_grad():
        assert not exe(x).requires_grad
