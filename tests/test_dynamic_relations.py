"""Sizes for which the relations do not hold that an export met with its example: multiples, equal sizes, branches, constants."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tilewright
from tilewright.errors import InvalidInput, InvalidModel, NotCompiled
from tilewright.frontend.sized import ModuleModel
from tilewright.frontend.torch_export import exported


class Related(nn.Module):
    """A product of `x` and one of `y`, and what a function makes of both."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), self.layer(y)).softmax(-1)


def multiple(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.reshape(4, -1) * b.sum()


def divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.reshape(4, -1) * 2 if a.shape[0] % 4 == 0 else a + b.mean(0)


def equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b if a.shape[0] == b.shape[0] else a @ b.T


def ordered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b.T if a.shape[0] > b.shape[0] else b.cumsum(0)[: a.shape[0]]


def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.repeat(2, 1) + b if b.shape[0] == 2 * a.shape[0] else a


def certain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.reshape(3, -1) if a.shape[0] == 12 else a.tanh() + b.sum()


FUNCTIONS = (multiple, divided, equal, ordered, twice, certain)
NAMED = {"x": {0: "a"}, "y": {0: "b"}}
SIZES = ((3, 4), (9, 9), (12, 24), (13, 5), (1, 1))
"""No multiple of 4 and one, equal and unequal ones, the double, 12 itself, the first less and greater, and ones."""


def inputs(sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size, 8) for size in sizes)


def check(module: nn.Module, call: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        wanted = copy.deepcopy(module).double()(*(tensor.double() for tensor in given))
        torch.testing.assert_close(call(*given).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        yield


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("dynamic", [True, NAMED], ids=["all", "named"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@settings(max_examples=2, deadline=None)
@given(example=st.sampled_from(((3, 3), (12, 12), (12, 5), (6, 12))), more=st.tuples(st.integers(2, 30), st.integers(2, 30)))
def test_other_relations_are_exported_for_themselves(
    function: Callable[..., torch.Tensor], dynamic: Any, example: tuple[int, int], more: tuple[int, int]
) -> None:
    module = Related(function).eval()
    with tilewright.compile(module, inputs(example), dynamic=dynamic, wait=True) as executable:
        for sizes in (example, *SIZES, more):
            check(module, executable, inputs(sizes))


def test_one_export_serves_all_sizes_of_a_relation() -> None:
    module = Related(divided).eval()
    model = ModuleModel(module, inputs((12, 12)), None, NAMED)
    for sizes in ((9, 9), (13, 10), (11, 30), (16, 5), (10, 9)):
        model.bind(model.key(inputs(sizes)))
    assert len(model._exports) == 1
    assert model.names == ("a", "b") and model.sizes(model.key(inputs((9, 10)))) == {"a": 9, "b": 10}


def test_sizes_that_follow_from_others_are_named_where_they_do_not() -> None:
    module = Related(equal).eval()
    with tilewright.compile(module, inputs((12, 12)), dynamic=NAMED, wait=True) as executable:
        check(module, executable, inputs((9, 9)))
        check(module, executable, inputs((9, 10)))
        assert executable.sizes == ({"a": 12}, {"a": 9}, {"a": 9, "b": 10})


def test_sizes_that_the_module_does_not_allow_either() -> None:
    module = Related(torch.add).eval()
    with tilewright.compile(module, inputs((12, 12)), dynamic=NAMED, wait=True) as executable:
        check(module, executable, inputs((9, 1)))
        for _ in range(2):
            with pytest.raises(InvalidInput, match=r"cannot be exported for a = 9, b = 7: .*must match") as caught:
                executable(*inputs((9, 7)))
            assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(InvalidInput, match="a = 9, b = 7"):
            executable.program(*inputs((9, 7)))


def test_bounds_and_equal_names_are_promises() -> None:
    module = Related(ordered).eval()
    promises = {"x": {0: torch.export.Dim("a", max=20)}, "y": {0: torch.export.Dim("b", min=4)}}
    with tilewright.compile(module, inputs((12, 5)), dynamic=promises, wait=True) as executable:
        check(module, executable, inputs((5, 20)))
        for sizes, message in (((21, 5), "a is 21, and `dynamic` gives 0 to 20"), ((9, 3), "b is 3, and `dynamic` gives 4 and more")):
            with pytest.raises(InvalidInput, match=message):
                executable(*inputs(sizes))
    with tilewright.compile(module, inputs((12, 12)), dynamic={"x": {0: "n"}, "y": {0: "n"}}, wait=True) as executable:
        check(module, executable, inputs((9, 9)))
        with pytest.raises(InvalidInput):
            executable(*inputs((9, 8)))


@pytest.mark.parametrize(("function", "relation"), [(equal, "a .* must always be equal"), (multiple, "Not all values of a")])
def test_relations_that_a_dim_excludes_are_named(function: Callable[..., torch.Tensor], relation: str) -> None:
    dims = {"x": {0: torch.export.Dim("a", max=20)}, "y": {0: torch.export.Dim("b", max=20)}}
    with pytest.raises(InvalidModel, match=rf"with these sizes free: .*{relation}.*; give a name instead of a torch.export.Dim"):
        tilewright.compile(Related(function).eval(), inputs((12, 12)), dynamic=dims)


def test_a_call_does_not_wait_for_another_export() -> None:
    module = Related(multiple).eval()
    with tilewright.compile(module, inputs((3, 3)), dynamic=NAMED, wait=0) as executable:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NotCompiled)
            for sizes in ((9, 9), (13, 9), (9, 9)):
                check(module, executable, inputs(sizes))
        assert len(caught) == 1 and "a = 9, b = 9 run eagerly until" in str(caught[0].message)
        assert executable.verify(*inputs((13, 9))).passed


def test_an_export_leaves_what_other_threads_trace_as_it_is() -> None:
    """Sizes are exported in the background, while the program may trace models for other compilers, which read metadata and code."""
    traced: list[Any] = []

    def trace() -> None:
        traced.append(make_fx(lambda x: x.sin() * 2)(torch.ones(3)))

    class Traces(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=trace)
            thread.start()
            thread.join()
            return x.cos()

    exported(Traces(), (torch.ones(3),))
    graph = traced[0]
    assert "sin" in graph.code
    assert all(node.meta["tensor_meta"].shape == (3,) for node in graph.graph.nodes if node.op == "call_function")


def test_numbers_that_equal_a_size_in_the_example() -> None:
    class Taken(nn.Module):
        def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
            return x.tanh() * 2 if count == x.shape[0] else x[:count].tanh() * count

    module = Taken()
    with tilewright.compile(module, (torch.randn(8, 3), 8), dynamic={"x": {0: "n"}, "count": "count"}, wait=True) as executable:
        for n, count in ((8, 8), (9, 4), (9, 9), (12, 1), (12, 0), (1, 1), (12, 5)):
            x = torch.randn(n, 3)
            torch.testing.assert_close(executable(x, count), module(x, count))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_other_relations_through_torch_compile(function: Callable[..., torch.Tensor], dynamic: bool | None) -> None:
    torch._dynamo.reset()
    module = Related(function).eval()
    run = torch.compile(module, backend="tilewright", dynamic=dynamic, options={"wait": True})
    for sizes in ((3, 3), *SIZES):
        check(module, run, inputs(sizes))
    torch._dynamo.reset()
