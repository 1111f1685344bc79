"""The executable: results against PyTorch, and everything that a caller may do with it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime_programs import ProgramBuilder, chain, chain_reference
from tilewright.errors import ExecutableBusy, ExecutableClosed, InvalidArtifact, InvalidInput, TilewrightError, UnsupportedOption
from tilewright.frontend.torch_operators import resolve_operator
from tilewright.ir.layout import channels_last, row_major
from tilewright.runtime import cpu as cpu_module
from tilewright.runtime.cpu import openmp_libraries
from tilewright.runtime.executable import Executable
from tilewright.runtime.fields import Field
from tilewright.runtime.module_stamp import ModuleStamp
from tilewright.runtime.signature import (
    LEAF,
    InputLeaf,
    OutputLeaf,
    Signature,
    StateLeaf,
    Tree,
    decode_signature,
    encode_signature,
    tree_of,
)


def test_chain_agrees_with_pytorch_and_reuses_memory() -> None:
    builder = chain()
    exe = builder.executable(("r4",))
    for _ in range(3):
        x = torch.randn(6, 7)
        expected = chain_reference(x.double(), builder.constants["w"].double())
        torch.testing.assert_close(exe(x).double(), expected, rtol=1e-5, atol=1e-5)
    memory = exe.plan.memory
    assert memory is not None and memory.bytes < memory.unshared_bytes / 4


def test_results_are_fresh() -> None:
    exe = chain().executable(("r4", "p0"))
    x = torch.randn(6, 7)
    first = exe(x)
    kept = [tensor.clone() for tensor in first]
    exe(torch.randn(6, 7))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert isinstance(first, tuple) and first[0].data_ptr() != first[1].data_ptr()


Pair = namedtuple("Pair", ["first", "second"])


def test_nested_arguments_and_results() -> None:
    builder = ProgramBuilder({"a": (3,), "b": (3,)})
    builder.kernel("add", ("a", "b"), "s", (3,), "for (int i = 0; i < 3; i++) y[i] = x0[i] + x1[i];")
    builder.kernel("sub", ("a", "b"), "d", (3,), "for (int i = 0; i < 3; i++) y[i] = x0[i] - x1[i];")
    a, b = torch.randn(3), torch.randn(3)
    _, spec = torch.utils._pytree.tree_flatten((({"a": a, "n": 2},), {"b": [b]}))
    _, out_spec = torch.utils._pytree.tree_flatten({"pair": Pair(a, None), "rest": (b, [1.5])})
    signature = Signature(
        (
            InputLeaf("args[0]['a']", "a", (3,), "f32"),
            InputLeaf("args[0]['n']", constant=2),
            InputLeaf("kwargs['b'][0]", "b", (3,), "f32"),
        ),
        tree_of(spec),
        (OutputLeaf("value", 0), OutputLeaf("constant"), OutputLeaf("value", 1), OutputLeaf("constant", value=1.5)),
        tree_of(out_spec),
    )
    exe = builder.executable(("s", "d"), signature)
    result = exe({"n": 2, "a": a}, b=[b])
    assert isinstance(result["pair"], Pair) and result["pair"].second is None and result["rest"][1] == [1.5]
    torch.testing.assert_close(result["pair"].first, a + b)
    torch.testing.assert_close(result["rest"][0], a - b)
    with pytest.raises(InvalidInput, match=r"args\[0\]\['n'\].*constant 2, got 3"):
        exe({"a": a, "n": 3}, b=[b])
    with pytest.raises(InvalidInput, match="keys"):
        exe({"a": a}, b=[b])
    decoded = decode_signature(Field(encode_signature(signature), "signature"))
    again = builder.executable(("s", "d"), decoded)({"a": a, "n": 2}, b=[b])
    torch.testing.assert_close(again["pair"].first, a + b)
    assert type(again["pair"]).__name__ == "Pair"


def test_inputs_are_changed_where_the_model_changes_them() -> None:
    builder = ProgramBuilder({"x": (4,), "state": (4,)})
    builder.kernel("add", ("x", "state"), "new", (4,), "for (int i = 0; i < 4; i++) y[i] = x0[i] + x1[i];")
    builder.kernel("mul", ("x", "state"), "out", (4,), "for (int i = 0; i < 4; i++) y[i] = x0[i] * x1[i];")
    specs = builder.signature(1)
    signature = Signature(specs.inputs, specs.input_tree, (OutputLeaf("value", 1),), LEAF, mutations=((1, 0),))
    exe = builder.executable(("new", "out"), signature)
    for state in (torch.randn(4), torch.randn(8)[::2]):
        x, before = torch.randn(4), state.clone()
        result = exe(x, state)
        torch.testing.assert_close(result, x * before)
        torch.testing.assert_close(state, x + before)


def test_outputs_that_are_inputs_or_parameters() -> None:
    builder = ProgramBuilder({"x": (2, 3)}, {"w": torch.randn(3)})
    builder.alias("flat", "x", (6,))
    builder.kernel("relu", ("x",), "y", (2, 3), "for (int i = 0; i < 6; i++) y[i] = x0[i] > 0 ? x0[i] : 0;")
    specs = builder.signature(1)
    turned = (("aten.transpose.int", (0, 1)), ("aten.select.int", (0, 1)))
    outputs = (
        OutputLeaf("input", 0),
        OutputLeaf("input", 0, calls=turned),
        OutputLeaf("value", 0),
        OutputLeaf("value", 1),
        OutputLeaf("value", 1),
        OutputLeaf("parameter", value="w"),
    )
    signature = Signature(specs.inputs, specs.input_tree, outputs, Tree("tuple", (LEAF,) * 6))
    signature = decode_signature(Field(encode_signature(signature), "signature"))
    weight = torch.nn.Parameter(builder.constants["w"].clone())
    exe = builder.executable(("flat", "y"), signature, live={"w": lambda: weight})
    x = torch.randn(3, 2).t()
    same, view, copy, fresh, twice, parameter = exe(x)
    assert same is x and parameter is weight
    assert torch.equal(view, x.t()[1]) and view.data_ptr() == x.t()[1].data_ptr()
    assert copy.data_ptr() != x.data_ptr() and torch.equal(copy, x.reshape(-1))
    assert fresh is twice and torch.equal(fresh, x.relu())
    loaded = builder.executable(("flat", "y"), signature)(x)
    assert torch.equal(loaded[5], weight)


def test_a_modules_buffers_change_as_in_pytorch() -> None:
    builder = ProgramBuilder({"x": (4,), "total": (4,)})
    builder.kernel("add", ("x", "total"), "new", (4,), "for (int i = 0; i < 4; i++) y[i] = x0[i] + x1[i];")
    specs = builder.signature(1)
    arguments = Tree("tuple", (Tree("tuple", (LEAF,)), Tree("dict")))
    signature = Signature(specs.inputs[:1], arguments, (OutputLeaf("value", 0),), LEAF, states=(StateLeaf("total", "total", 0),))
    buffer = torch.zeros(4)
    exe = Executable(replace(builder.image(("new",), signature), states={"total": buffer}))
    x = torch.randn(4)
    exe(x)
    other = exe.clone()
    torch.testing.assert_close(exe(x), 2 * x)
    torch.testing.assert_close(buffer, 2 * x)
    torch.testing.assert_close(other(x), 2 * x)
    torch.testing.assert_close(buffer, 2 * x)


def test_views_of_a_result_and_constants_as_outputs() -> None:
    builder = ProgramBuilder({"x": (2, 3)}, {"w": torch.randn(4)})
    builder.kernel("relu", ("x",), "y", (2, 3), "for (int i = 0; i < 6; i++) y[i] = x0[i] > 0 ? x0[i] : 0;")
    builder.alias("flat", "y", (6,))
    exe = builder.executable(("flat", "w"))
    x = torch.randn(2, 3)
    flat, w = exe(x)
    assert torch.equal(flat, x.relu().view(-1)) and torch.equal(w, builder.constants["w"])
    w.zero_()
    assert torch.equal(exe(x)[1], builder.constants["w"])


def test_nodes_through_pytorch_between_kernels() -> None:
    builder = ProgramBuilder({"x": (4, 5)})
    loop = "for (int i = 0; i < 20; i++)"
    builder.kernel("relu", ("x",), "a", (4, 5), f"{loop} y[i] = x0[i] > 0 ? x0[i] : 0;")
    call = ((("input", 0), ("value", -1), ("value", True)), ())
    builder.torch("aten.sort.default", call, ("a",), {"sorted": ((4, 5), "f32"), "index": ((4, 5), "i64")})
    builder.kernel("add", ("a", "sorted"), "b", (4, 5), f"{loop} y[i] = x0[i] + x1[i];")
    exe = builder.executable(("b", "index"))
    for _ in range(2):
        x = torch.randn(4, 5)
        values, index = x.relu().sort(-1, True)
        got = exe(x)
        torch.testing.assert_close(got[0], x.relu() + values)
        assert torch.equal(x.relu().gather(1, got[1]), values) and index.shape == got[1].shape
    assert exe.verify(torch.randn(4, 5)).values


def test_a_region_without_kernel_is_evaluated_by_its_definition() -> None:
    builder = chain(2)
    for i, lowered in enumerate(builder.regions):
        if i in (1, 2, 4):
            builder.regions[i] = replace(lowered, region=replace(lowered.region, kind="torch"), kernels=(), calls=())
    exe = builder.executable(("r1",))
    x = torch.randn(6, 7)
    torch.testing.assert_close(exe(x), chain_reference(x, builder.constants["w"], 2))
    assert exe.verify(x).passed
    builder.regions[1] = replace(builder.regions[1], region=replace(builder.regions[1].region, nodes=()))
    with pytest.raises(InvalidArtifact, match="q0"):
        builder.executable(("r1",))


def test_repeated_calls_get_their_number() -> None:
    builder = ProgramBuilder({"x": (8, 3)})
    body = "int t = scalars[0]; for (int i = 3 * t; i < 3 * t + 3; i++) y[i] = x0[i] + (t ? y[i - 3] : 0);"
    builder.kernel("cumsum", ("x",), "y", (8, 3), body, {"axis": 0}, repeat=8, scalars=1)
    x = torch.randn(8, 3)
    torch.testing.assert_close(builder.executable(("y",))(x), x.cumsum(0))


def test_a_halo_is_zero_at_every_call_and_verify_reads_layouts() -> None:
    layout = channels_last((1, 3, 4, 5)).with_halo(((0, 0), (0, 0), (1, 1), (1, 1)))
    builder = ProgramBuilder({"x": (1, 3, 4, 5)})
    store = "for (int c = 0; c < 3; c++) for (int h = 0; h < 4; h++) for (int w = 0; w < 5; w++) "
    inside = "((h + 1) * 7 + w + 1) * 3 + c"
    flat = "(c * 4 + h) * 5 + w"
    builder.kernel("relu", ("x",), "a", (1, 3, 4, 5), store + f"y[{inside}] = x0[{flat}] > 0 ? x0[{flat}] : 0;", layout=layout)
    total = "double s = 0; for (int i = 0; i < 6 * 7 * 3; i++) s += x0[i]; "  # the halo counts as well
    builder.kernel("mul", ("a", "a"), "b", (1, 3, 4, 5), store + f"y[{inside}] = x0[{inside}] * x1[{inside}];", layout=layout)
    builder.kernel("sum", ("b",), "s", (), total + "y[0] = s;", {"axes": (0, 1, 2, 3)})
    exe = builder.executable(("s",))
    for _ in range(4):
        x = torch.randn(1, 3, 4, 5)
        torch.testing.assert_close(exe(x), (x.relu() ** 2).sum())
    report = exe.verify(torch.randn(1, 3, 4, 5))
    assert report.passed and [v.value for v in report.values] == ["a", "b", "s"], str(report)


def test_verify_names_the_first_wrong_region() -> None:
    builder = chain(3)
    builder.text = builder.text.replace("void kernel4(", "void unused(", 1)
    builder.text += (
        "void kernel4(void *const *arguments, const int64_t *scalars) { (void)scalars; const float *a = arguments[0], "
        "*b = arguments[1]; float *y = arguments[2]; for (int i = 0; i < 42; i++) y[i] = a[i] + b[i] + (i == 5); }\n"
    )
    report = builder.executable(("r2",)).verify(torch.randn(6, 7))
    assert not report.passed and report.first_wrong is not None
    assert (report.first_wrong.region, report.first_wrong.value) == ("region4", "q1")
    assert "first wrong: region region4" in str(report)
    good = chain(3).executable(("r2",)).verify(torch.randn(6, 7))
    assert good.passed and len(good.values) == 9
    assert [v.relative_error for v in good.worst] == sorted((v.relative_error for v in good.values), reverse=True)


def test_verify_reads_a_value_after_the_last_region_that_writes_it() -> None:
    builder = ProgramBuilder({"x": (4,)})
    builder.kernel("relu", ("x",), "y", (4,), "for (int i = 0; i < 2; i++) y[i] = x0[i] > 0 ? x0[i] : 0;")
    builder.kernel("relu", ("x",), "y", (4,), "for (int i = 2; i < 4; i++) y[i] = x0[i] > 0 ? x0[i] : 0;")
    builder.nodes.pop()
    report = builder.executable(("y",)).verify(torch.randn(4))
    assert report.passed and [v.region for v in report.values] == ["region1"] and str(report).endswith("\nthe 1 value agrees")


def test_verify_sees_nan_and_keeps_inputs() -> None:
    builder = ProgramBuilder({"x": (4,)})
    builder.kernel("relu", ("x",), "y", (4,), "for (int i = 0; i < 4; i++) y[i] = x0[i] > 0 ? x0[i] : 0;")  # loses NaN
    x = torch.tensor([1.0, float("nan"), float("inf"), -1.0])
    kept = x.clone()
    report = builder.executable(("y",)).verify(x)
    assert not report.passed and report.values[0].relative_error == float("inf")
    assert torch.equal(x.nan_to_num(7), kept.nan_to_num(7))


def test_clones_run_at_the_same_time() -> None:
    builder = chain(4, (64, 64))
    exe = builder.executable(("r3",))
    engine: Any = exe._engine
    clones = [exe, exe.clone(), exe.clone()]
    second: Any = clones[1]._engine
    assert second.buffers.constants["w"] is engine.buffers.constants["w"]
    assert second.buffers.arena.data_ptr() != engine.buffers.arena.data_ptr()
    failures: list[str] = []

    def work(which: int) -> None:
        generator = torch.Generator().manual_seed(which)
        for _ in range(30):
            x = torch.randn(64, 64, generator=generator)
            got = clones[which % 3](x)
            if not torch.allclose(got, chain_reference(x, builder.constants["w"], 4), rtol=1e-4, atol=1e-4):
                failures.append(f"thread {which}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]  # two callers for each executable
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_openmp_runtime_and_its_threads() -> None:
    loaded = openmp_libraries()  # PyTorch's, and scikit-learn's if another test trained a model
    builder = ProgramBuilder({"x": (1,)})
    count = "int n = 0;\n#pragma omp parallel reduction(+:n)\nn += 1;\n y[0] = x0[0] + n;"
    builder.kernel("relu", ("x",), "y", (1,), count)
    exe = builder.executable(("y",))
    x, before = torch.zeros(1), torch.get_num_threads()
    assert exe.threads == before and exe(x).item() == before
    for wanted in (1, 3, 2):
        exe.threads = wanted
        assert exe(x).item() == wanted and torch.get_num_threads() == before
    assert builder.executable(("y",), threads=2)(x).item() == 2
    assert openmp_libraries() == loaded
    with pytest.raises(UnsupportedOption):
        exe.threads = 0


def test_pytorchs_runtime_is_found_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may be a link, whereas the process's maps have paths without links."""
    package = Path(torch.__file__).resolve().parent
    (tmp_path / "site-packages").symlink_to(package.parent)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "site-packages" / package.name / "__init__.py"))
    found = openmp_libraries()
    monkeypatch.setattr(cpu_module, "openmp_libraries", lambda: ("/another/libgomp.so.1", *found))
    shared = cpu_module.share_openmp()
    assert shared is not None and shared._name in found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("made", ["before", "after"])
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(made: str) -> None:
    builder = ProgramBuilder({"x": (1,)})
    count = "int n = 0;\n#pragma omp parallel reduction(+:n)\nn += 1;\n y[0] = x0[0] + n;"
    builder.kernel("relu", ("x",), "y", (1,), count)
    exe, x = builder.executable(("y",), threads=2), torch.zeros(1)
    assert exe(x).item() == 2
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler would wait as well
        signal.alarm(20)
        os._exit(int((exe if made == "before" else exe.clone())(x).item()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert exe(x).item() == 2


def test_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = chain(1)
    monkeypatch.setenv("TILEWRIGHT_THREADS", "3")
    assert builder.executable(("r0",)).threads == 3 and builder.executable(("r0",), threads=2).threads == 2
    for wrong in ("0", "-1", "100000", "two"):
        monkeypatch.setenv("TILEWRIGHT_THREADS", wrong)
        with pytest.raises(UnsupportedOption, match="TILEWRIGHT_THREADS"):
            builder.executable(("r0",))


def test_without_a_compiler_a_python_loop_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = chain()
    image = builder.image(("r4",))
    monkeypatch.setattr(cpu_module, "_load_runner", lambda: None)
    exe = Executable(image)
    assert exe._engine.library.runner is None  # type: ignore[union-attr]
    for _ in range(2):
        x = torch.randn(6, 7)
        torch.testing.assert_close(exe(x), chain_reference(x, builder.constants["w"]))


def test_stale_modules() -> None:
    module = torch.nn.Linear(3, 4)
    exe = chain(1).executable(("r0",), stamp=ModuleStamp.of(module))
    assert not exe.is_stale(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert exe.is_stale(module)
    exe = chain(1).executable(("r0",), stamp=ModuleStamp.of(module))
    module.bias = torch.nn.Parameter(module.bias.detach().clone())
    assert exe.is_stale(module) and exe.is_stale(torch.nn.Linear(3, 5))
    with pytest.raises(UnsupportedOption):
        chain(1).executable(("r0",)).is_stale(module)


@pytest.mark.parametrize("use", [lambda exe: exe(torch.ones(6, 7)), lambda exe: exe.verify(torch.ones(6, 7)), lambda exe: exe.close()])
def test_nothing_runs_inside_of_a_call(use: Callable[[Executable], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that called the executable would write to the memory of the interrupted call."""
    exe, x = chain(1).executable(("r0",)), torch.randn(6, 7)
    right, engine = exe(x), exe._engine
    assert engine is not None
    run, copies = engine.run, []

    def interrupted(first: int, last: int) -> None:
        monkeypatch.undo()
        copies.append(exe.clone()(x))
        with pytest.raises(ExecutableBusy, match="clone"):
            use(exe)
        run(first, last)

    monkeypatch.setattr(engine, "run", interrupted)
    assert torch.equal(exe(x), right) and torch.equal(copies[0], right)
    assert torch.equal(exe(x), right)


def test_copies_are_clones_and_pickles_are_refused() -> None:
    exe, x = chain(1).executable(("r0",)), torch.randn(6, 7)
    for made in (copy.copy(exe), copy.deepcopy([exe])[0]):
        made.close()
    with pytest.raises(UnsupportedOption, match="save"):
        pickle.dumps(exe)
    assert torch.equal(exe(x), exe.clone()(x))


def test_close() -> None:
    exe = chain(1).executable(("r0",))
    with exe:
        exe(torch.randn(6, 7))
    exe.close()
    with pytest.raises(ExecutableClosed):
        exe(torch.randn(6, 7))
    with pytest.raises(ExecutableClosed):
        exe.clone()


def test_plan_prints_every_region() -> None:
    plan = chain(2).executable(("r1",)).plan
    text = str(plan)
    assert "6 regions" in text and "predicted 6 us" in text and all(len(line) <= 80 for line in text.splitlines())
    assert plan.rows[0].nodes == (("node_p0", "mul", "model.p0"),)


def test_missing_kernel_is_named() -> None:
    builder = chain(1)
    builder.text = builder.text.replace("kernel2", "other")
    builder.entries[2] = "other"
    with pytest.raises(TilewrightError, match="kernel2"):
        builder.executable(("r0",))


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.out",
        "torch.prims.add.default",
        "aten.add_.Tensor",
        "aten.nothing.default",
        "os.system",
        "aten.__class__.x",
    ],
)
def test_only_functional_operators_are_resolved(target: str) -> None:
    with pytest.raises(InvalidArtifact):
        resolve_operator(target)
    assert resolve_operator("aten.sort.default") is torch.ops.aten.sort.default


class Everything(torch.nn.Module):
    """Changes a buffer and an input, and returns a view, an input, a parameter and constants."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("total", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor, factor: int = 2, *, memory: dict[str, torch.Tensor]) -> dict[str, object]:
        self.total.add_(x)
        memory["sum"].add_(x)
        return {"y": x * factor, "view": x.t(), "same": x, "weight": self.weight, "three": 3, "none": None}


def test_a_module_read_by_the_front_end_behaves_as_in_pytorch() -> None:
    """Every node becomes a region that runs through PyTorch, to test everything around the kernels."""
    from tilewright.frontend.torch_import import import_module
    from tilewright.hardware import host_cpu
    from tilewright.ir.region import Lowered, Program, Region, Storage
    from tilewright.runtime.executable import executable_of

    module, theirs = Everything(), Everything()
    theirs.load_state_dict(module.state_dict())
    imported = import_module(module, (torch.randn(3, 4), 2), {"memory": {"sum": torch.zeros(3, 4)}})
    aten = {"add": "aten.add.Tensor", "mul": "aten.mul.Tensor"}
    values = imported.graph.values
    nodes = []
    for node in imported.graph.nodes:
        arguments = [("input", i) for i in range(len(node.inputs))]
        for position, scalar in node.attributes.get("scalars", ()):
            arguments.insert(position, ("value", scalar))
        if node.operator in aten:
            call = (tuple(arguments), ())
            node = replace(node, operator="torch", attributes={"target": aten[node.operator], "call": call})
        else:
            assert not set(node.outputs) & set(imported.graph.outputs), node
            continue
        nodes.append(node)
    regions = tuple(Lowered(Region(n.name, "torch", (n,), (), n.inputs, n.outputs), "", (), ()) for n in nodes)
    storage = {name: Storage(value, row_major(value.shape)) for name, value in values.items()}
    program = Program(imported.graph.with_nodes(nodes), "native", regions, storage)
    exe = executable_of(program, imported, host_cpu(), (), module=module, parameters=("x", "factor"))
    ours_memory, their_memory = torch.zeros(3, 4), torch.zeros(3, 4)
    for _ in range(3):
        x = torch.randn(3, 4)
        with torch.no_grad():
            expected = theirs(x, 2, memory={"sum": their_memory})
        got = exe(x, factor=2, memory={"sum": ours_memory})
        torch.testing.assert_close(got["y"], expected["y"])
        assert got["same"] is x and got["weight"] is module.weight and got["three"] == 3 and got["none"] is None
        assert got["view"].data_ptr() == x.data_ptr() and torch.equal(got["view"], x.t())
        torch.testing.assert_close(ours_memory, their_memory)
        torch.testing.assert_close(module.total, theirs.total)
    assert not exe.is_stale(module)
    with torch.no_grad():
        module.weight.mul_(2)
    assert exe.is_stale(module)
