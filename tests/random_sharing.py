"""Random programs whose results share memory: views, writes in place, copies and arithmetic on tensors of one type, and what they return.

A program is a list of statements over numbered tensors, so that a failure prints as Python, and one without some of its statements is a program too.
`sharing` writes to each result and changed input in turn and says which others change: that is compared with PyTorch, beside the values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.runtime.executable import Executable

Statement = tuple[str, tuple[int, ...]]
"""Python for a tensor, with {0}, {1} in place of the numbers of its operands."""
TYPES = (torch.float32, torch.float32, torch.float16, torch.int64, torch.int32, torch.complex64)
RESULTS = 6


class Program(nn.Module):
    """Runs the statements; `v0`, `v1`, ... are its inputs, its buffers, and the statements' results."""

    def __init__(self, inputs: Sequence[Tensor], buffers: Sequence[Tensor], statements: Sequence[Statement], returned: Sequence[int]) -> None:
        super().__init__()
        self.examples = tuple(inputs)
        self.statements, self.returned = tuple(statements), tuple(returned)
        self.count = len(buffers)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"b{number}", buffer)
        lines = [f"    v{len(inputs) + number} = self.b{number}" for number in range(len(buffers))]
        first = len(inputs) + len(buffers)
        for number, (text, operands) in enumerate(statements, first):
            lines.append(f"    v{number} = " + text.format(*(f"v{operand}" for operand in operands)))
        arguments = ", ".join(f"v{number}" for number in range(len(inputs)))
        results = "".join(f"v{number}, " for number in returned)
        self.source = f"def forward(self, {arguments}):\n" + "\n".join([*lines, f"    return ({results})"])
        space: dict[str, Any] = {"torch": torch}
        exec(self.source, space)
        self.function: Callable[..., Any] = space["forward"]

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        buffers = [getattr(self, f"b{number}").clone() for number in range(self.count)]
        return Program(self.examples, buffers, self.statements, self.returned)

    def __repr__(self) -> str:
        kinds = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} strides {x.stride()}" for x in self.examples]
        return f"inputs {', '.join(kinds)}, {self.count} buffers\n{self.source}"


@dataclass
class _Growth:
    """A program while it grows, with the tensors that it has made of the examples."""

    draw: Random
    values: list[Tensor]
    statements: list[Statement]

    def pick(self, suits: Callable[[Tensor], bool] = lambda x: True) -> int | None:
        """The number of a tensor that suits, with a preference for the newest."""
        found = [number for number, value in enumerate(self.values) if suits(value)]
        if not found:
            return None
        return found[-1] if self.draw.random() < 0.4 else self.draw.choice(found)

    def add(self, text: str, *operands: int) -> bool:
        """Adds a statement if PyTorch runs it on the examples."""
        names = {f"v{number}": value for number, value in enumerate(self.values)}
        try:
            with torch.no_grad():
                value = eval(text.format(*(f"v{operand}" for operand in operands)), {"torch": torch}, names)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        if not isinstance(value, Tensor) or value.numel() > 500:
            return False
        self.values.append(value)
        self.statements.append((text, operands))
        return True


def _view(g: _Growth) -> bool:
    x = g.pick()
    assert x is not None
    value, draw = g.values[x], g.draw
    rank = max(value.dim(), 1)
    dim, other = draw.randrange(rank), draw.randrange(rank)
    extent = value.shape[dim] if value.dim() else 1
    start = draw.randrange(max(extent, 1))
    choices = [
        f"{{0}}.transpose({dim}, {other})", f"{{0}}.unsqueeze({dim})", f"{{0}}.select({dim}, {start})", f"{{0}}.narrow({dim}, {start}, {extent - start})",
        f"{{0}}.split({draw.randint(1, 2)}, {dim})[-1]", f"{{0}}.unbind({dim})[{start}]", f"{{0}}.chunk(2, {dim})[0]", "{0}.view(-1)", "{0}.reshape(-1)",
        "{0}.flatten()", "{0}.contiguous()", "{0}.detach()", "{0}.squeeze()", f"{{0}}[{start}:]", f"{{0}}[..., ::{draw.randint(1, 2)}]", "{0}.view_as({0})",
        f"{{0}}.unfold({dim}, {draw.randint(1, 2)}, 1)", "{0}.diagonal()", "{0}.unsqueeze(0).expand(2, *{0}.shape)", "{0}.t()", "{0}.mT",
        "{0}.movedim(0, -1)", "{0}.to({0}.dtype)", "{0}.expand_as({0})", "{0}.swapaxes(0, -1)", "{0}.data", "{0}.ravel()",
        f"{{0}}.unflatten({dim}, (-1, 1))", f"{{0}}.tensor_split(2, {dim})[1]",
    ]  # fmt: skip
    if value.is_complex():
        choices += ["{0}.conj()", "{0}.conj()", "torch.view_as_real({0})", "{0}.real", "{0}.imag", "{0}.mH"]
    elif value.dtype is torch.float32 and value.dim() and value.shape[-1] == 2:
        choices += ["torch.view_as_complex({0})"]
    if value.dtype is torch.float32:
        choices += ["{0}.view(torch.int32)"]
    return g.add(draw.choice(choices), x)


def _copy(g: _Growth) -> bool:
    x = g.pick()
    assert x is not None
    choices = (
        "{0}.clone()",
        "{0}.to({0}.dtype, copy=True)",
        "torch.cat([{0}])",
        "{0}.clone(memory_format=torch.contiguous_format)",
        "torch.stack([{0}])[0]",
    )
    return g.add(
        g.draw.choice((*choices, "{0}.flip(0)", "torch.zeros_like({0})", "{0}.repeat(1, 1)", "{0} * 1", "{0}.index_select(0, torch.tensor([0]))")), x
    )


def _compute(g: _Growth) -> bool:
    x = g.pick()
    assert x is not None
    y = g.pick(lambda value: value.shape == g.values[x].shape and value.dtype == g.values[x].dtype)
    if y is not None and g.draw.random() < 0.5:
        return g.add(g.draw.choice(("{0} + {1}", "{0} - {1}", "torch.cat([{0}, {1}])")), x, y)
    return g.add(g.draw.choice(("{0} * 2", "{0} + 3", "-{0}")), x)


def _write(g: _Growth) -> bool:
    x = g.pick()
    assert x is not None
    value = g.values[x]
    y = g.pick(lambda other: other.shape == value.shape and other.dtype == value.dtype)
    if y is not None and y != x and g.draw.random() < 0.4:
        return g.add(g.draw.choice(("{0}.copy_({1})", "{0}.add_({1})", "{0}.sub_({1})")), x, y)
    dim = g.draw.randrange(max(value.dim(), 1))
    choices = ["{0}.mul_(2)", "{0}.add_(1)", "{0}.neg_()", "{0}.zero_()", "{0}.fill_(3)", f"{{0}}.index_fill_({dim}, torch.tensor([0]), 5)"]
    return g.add(g.draw.choice([*choices, f"{{0}}.index_add_({dim}, torch.tensor([0]), {{0}}.narrow({dim}, 0, 1).clone())"]), x)


def _numbers(draw: Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, of which sums are exact in every type."""
    count = torch.Size(shape).numel()
    tensor = torch.tensor([draw.randint(-4, 4) for _ in range(count)], dtype=dtype).reshape(shape)
    return tensor + 1j * torch.arange(count).remainder(5).reshape(shape) if dtype.is_complex else tensor


def random_program(seed: int) -> Program:
    """The program of a seed: one or two inputs, at most one buffer, three to nine statements, up to RESULTS results."""
    draw = Random(seed)
    dtype = draw.choice(TYPES)
    shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    inputs = [_numbers(draw, shape if draw.random() < 0.7 else shape[::-1], dtype) for _ in range(draw.randint(1, 2))]
    inputs = [x.mT.contiguous().mT if x.dim() > 1 and draw.random() < 0.2 else x for x in inputs]
    buffers = [_numbers(draw, shape, dtype)] if draw.random() < 0.3 else []
    growth = _Growth(draw, [*(x.clone() for x in inputs), *(x.clone() for x in buffers)], [])
    wanted = draw.randint(3, 9)
    for _ in range(10 * wanted):
        if len(growth.statements) < wanted:
            draw.choices((_view, _copy, _compute, _write), (5, 2, 2, 3))[0](growth)
    count = len(growth.values)
    returned = [draw.randrange(count) if draw.random() < 0.4 else draw.randrange(len(inputs), count) for _ in range(draw.randint(2, RESULTS))]
    return Program(inputs, buffers, growth.statements, returned)


@dataclass(frozen=True)
class Outcome:
    """What a call returned and left in its inputs and buffers; pairs (i, j) of these tensors of which a write to i changes j; pairs that are one."""

    values: tuple[Tensor, ...]
    shared: frozenset[tuple[int, int]]
    same: frozenset[tuple[int, int]]

    def difference(self, wanted: Outcome, identity: bool) -> str:
        """How this differs from what is wanted; empty if it does not. `identity`: which tensors are one counts too."""
        for number, (found, value) in enumerate(zip(self.values, wanted.values, strict=True)):
            if found.dtype != value.dtype or found.shape != value.shape or not torch.equal(found, value):
                return f"value {number}: {found} instead of {value}"
        for what, pairs, expected in (("shared", self.shared, wanted.shared), ("same", self.same, wanted.same)):
            if pairs != expected and (identity or what != "same"):
                return f"{what}: {sorted(pairs - expected)} too many, {sorted(expected - pairs)} too few"
        return ""


def outcome(call: Callable[..., Any], inputs: Sequence[Tensor], buffers: Sequence[Tensor]) -> Outcome:
    given = [x.clone(memory_format=torch.preserve_format) for x in inputs]
    with torch.no_grad():
        tensors = [*call(*given), *given, *buffers]
        values = tuple(tensor.clone() for tensor in tensors)
        return Outcome(values, sharing(tensors), frozenset((i, j) for j, y in enumerate(tensors) for i in range(j) if tensors[i] is y))


def problem(program: Program, made: Callable[[Program], tuple[Callable[..., Any], Sequence[Tensor]]]) -> str:
    """How two calls differ from PyTorch's; empty if they do not. `made` returns what is called for a program, and the buffers that calls change. What
    Dynamo calls may return one tensor as two, whatever the back end."""
    model, call_and_buffers = copy.deepcopy(program), made(copy.deepcopy(program))
    call, buffers = call_and_buffers
    for inputs in (program.examples, [x + 1 for x in program.examples]):
        wanted = outcome(model, inputs, [buffer for _, buffer in sorted(model.named_buffers())][: len(buffers)])
        different = outcome(call, inputs, buffers).difference(wanted, identity=isinstance(call, Executable))
        if different:
            return different
    return ""


def sharing(tensors: Sequence[Tensor]) -> frozenset[tuple[int, int]]:
    """Pairs (i, j): a write to tensor i changes tensor j. The tensors keep their elements."""
    found = set()
    for i, written in enumerate(tensors):
        before = [tensor.clone() for tensor in tensors]
        _rewrite(written, before[i] + 1)
        found |= {(i, j) for j, tensor in enumerate(tensors) if j != i and not torch.equal(tensor, before[j])}
        _rewrite(written, before[i])
    return frozenset(found)


def _rewrite(tensor: Tensor, new: Tensor) -> None:
    """Copies elements that may lie in the same memory, one of several copies then."""
    if 0 in tensor.stride() or tensor.dim():
        for place in torch.cartesian_prod(*(torch.arange(size) for size in tensor.shape)).reshape(-1, tensor.dim()).tolist():
            tensor[tuple(place)] = new[tuple(place)]
    else:
        tensor.copy_(new)


def without(program: Program, number: int) -> Program | None:
    """The program without a statement or a result, counted from the first statement; None if others need it."""
    first = len(program.examples) + program.count
    buffers = [getattr(program, f"b{k}").clone() for k in range(program.count)]
    if number >= len(program.statements):
        at = number - len(program.statements)
        returned = [result for k, result in enumerate(program.returned) if k != at]
        return Program(program.examples, buffers, program.statements, returned) if returned else None
    gone = first + number
    rest = [statement for k, statement in enumerate(program.statements) if k != number]
    if gone in program.returned or any(gone in operands for _, operands in rest):
        return None

    def fresh(k: int) -> int:
        return k - (k > gone)

    statements = [(text, tuple(map(fresh, operands))) for text, operands in rest]
    return Program(program.examples, buffers, statements, tuple(map(fresh, program.returned)))


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that fails too."""
    number = 0
    while number < len(program.statements) + len(program.returned):
        smaller = without(program, number)
        if smaller is not None and fails(copy.deepcopy(smaller)):
            program, number = smaller, 0
        else:
            number += 1
    return program
