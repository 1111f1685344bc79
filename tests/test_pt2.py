"""Files of exported programs: ordinary ones are read, and nothing in a hostile one is run, imported or unpickled."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tilewright
from tests.limits import limited
from tilewright.cli import main
from tilewright.errors import InvalidModel, TilewrightError, UnsupportedOperator
from tilewright.frontend.torch_export import load_exported
from tilewright.frontend.torch_import import import_exported

Members = dict[str, bytes]
PROGRAM, SAMPLES = "m/models/model.json", "m/data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "m/data/weights/model_weights_config.json", "m/data/constants/model_constants_config.json"


class Runs:
    """An object whose pickle creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def exported(path: Path, module: nn.Module, *inputs: Any, **keywords: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, inputs, keywords), path)
    return path


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """The members of a small archive."""
    path = exported(tmp_path_factory.mktemp("pt2") / "m.pt2", nn.Linear(4, 3), torch.ones(2, 4))
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def changed(members: Members, name: str, change: Callable[[Any], None]) -> Members:
    """The members with one JSON document changed in place."""
    document = json.loads(members[name])
    change(document)
    return {**members, name: json.dumps(document).encode()}


# Ordinary files


class Mixed(nn.Module):
    """A view as buffer, a constant, regions without gradients, nested inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("position", torch.arange(4.0).expand(2, 4))
        self.tied = self.linear.weight

    def forward(self, x: Tensor, other: dict[str, Tensor], *, scale: Tensor, flag: bool = True) -> Any:
        with torch.no_grad():
            y = self.linear(x)
        z = self.norm(y) * scale + torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.position
        return OrderedDict(a=z @ self.tied, b=(other["q"] * 2, 3, None)), y.split(2, 1)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), (torch.randn(1, 3, 8, 8),)),
        (nn.LSTM(3, 4, 2, bidirectional=True), (torch.randn(5, 2, 3),)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (torch.randn(1, 5, 8),)),
        (nn.Embedding(10, 4, padding_idx=0), (torch.randint(10, (2, 3)),)),
        (Function(lambda x, n, word: x * n + len(word)), (torch.randn(3), 2.5, "two")),
        (Function(lambda x: (x[:, ::2], x.new_zeros(2, dtype=torch.int64), *x.topk(2))), (torch.randn(3, 4),)),
        (Function(lambda x: defaultdict(list, a=x + torch.inf, b=x.to(torch.float64))), (torch.randn(3, 0, 4),)),
    ],
)
def test_ordinary_programs(module: nn.Module, inputs: tuple[Any, ...], tmp_path: Path) -> None:
    module = module.eval().requires_grad_(False)
    path = exported(tmp_path / "m.pt2", module, *inputs)
    expected = module(*inputs)
    torch.testing.assert_close(load_exported(path).module()(*inputs), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = tilewright.compile(path)(*inputs)
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nested_calls_and_regions(tmp_path: Path) -> None:
    module, x, q, scale = Mixed().eval().requires_grad_(False), torch.randn(2, 4), torch.randn(3), torch.randn(4)
    path = exported(tmp_path / "m.pt2", module, x, {"q": q}, scale=scale)
    ours, expected = tilewright.compile(str(path))(x, {"q": q}, scale=scale), module(x, {"q": q}, scale=scale)
    assert isinstance(ours[0], OrderedDict) and ours[0]["b"][1:] == (3, None)
    torch.testing.assert_close(ours[0]["a"], expected[0]["a"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-4, atol=1e-5)
    program = load_exported(path)
    assert program.state_dict["tied"].data_ptr() == program.state_dict["linear.weight"].data_ptr()


def test_commands_draw_inputs_of_the_programs_types(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = exported(tmp_path / "m.pt2", Function(lambda i, x: nn.functional.embedding(i, x)), torch.tensor([[5, 7]]), torch.randn(8, 3))
    assert main(["verify", str(path)]) == 0
    assert "agrees with float64" in capfd.readouterr().out


# Files that would run code


def pickled(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Runs(marker), buffer)
    return buffer.getvalue()


def _payload(name: str, path_name: str, data: bytes) -> Callable[[Members], Members]:
    def hostile(members: Members) -> Members:
        entry = {"path_name": path_name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        folder = name.rpartition("/")[0]
        return changed({**members, f"{folder}/{path_name}": data}, name, lambda d: d["config"].update(added=entry))

    return hostile


def _graph(change: Callable[[Any], None]) -> Callable[[Members], Members]:
    return lambda members: changed(members, PROGRAM, lambda d: change(d["graph_module"]))


def hostile_files(marker: Path) -> dict[str, tuple[Callable[[Members], Members], str | None]]:
    """Changes of an archive with the expected words of the refusal, or None if the code is ignored."""
    data, command = pickled(marker), f"__import__('os').system('touch {marker}')"

    def named(module: Any) -> None:
        text = json.dumps(module).replace('"input"', json.dumps(f"input={command}"))
        module.clear()
        module.update(json.loads(text))

    def imports(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        specification = json.loads(signature["in_spec"])
        context = {"default_factory_module": "imported_by_a_file", "default_factory_name": "list", "dict_context": []}
        specification[1]["children_spec"][1].update(type="collections.defaultdict", context=context)
        signature["in_spec"] = json.dumps(specification)

    def enumerated(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        specification = json.loads(signature["out_spec"])
        context = json.dumps([{"__enum__": True, "fqn": "imported_by_a_file:A", "name": "B"}])
        specification[1] = {"type": "builtins.dict", "context": context, "children_spec": [specification[1]]}
        signature["out_spec"] = json.dumps(specification)

    def sized(module: Any) -> None:
        module["graph"]["tensor_values"]["input"]["sizes"][0] = {"as_expr": {"expr_str": command, "hint": {"as_int": 2}}}

    def calls(module: Any) -> None:
        node = module["graph"]["nodes"][0]
        node["target"], node["inputs"] = "torch.os.system", [{"name": "", "arg": {"as_string": f"touch {marker}"}, "kind": 1}]

    def opens(module: Any) -> None:
        node = module["graph"]["nodes"][0]
        arguments = {"filename": {"as_string": str(marker)}, "shared": {"as_bool": True}, "size": {"as_int": 4}}
        node["target"] = "torch.ops.aten.from_file.default"
        node["inputs"] = [{"name": name, "arg": arg, "kind": 1} for name, arg in arguments.items()]

    def called(module: Any) -> None:
        module["module_call_graph"][0]["signature"]["forward_arg_names"] = [f"x={command}"]

    def weighted(members: Members) -> Members:
        name = json.dumps(f'weight"), {command}, ("').encode()
        texts = {key: members[key].replace(b'{"weight"', b"{" + name) for key in (WEIGHTS, CONSTANTS)}
        return {**members, **texts, PROGRAM: members[PROGRAM].replace(b'"parameter_name": "weight"', b'"parameter_name": ' + name)}

    def guarded(members: Members) -> Members:
        return changed(members, PROGRAM, lambda d: d.update(guards_code=[command], verifiers=[command], range_constraints={command: {}}))

    def old(members: Members) -> Members:
        names = ("serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt")
        return {"version": b"8.20", "serialized_exported_program.json": members[PROGRAM], **dict.fromkeys(names, data)}

    return {
        "sample inputs": (lambda m: {**m, SAMPLES: data}, None),
        "a weight": (_payload(WEIGHTS, "weight_9", data), "stores added as a pickle"),
        "a constant": (_payload(CONSTANTS, "tensor_9", data), "stores added as a pickle"),
        "a script object": (_payload(CONSTANTS, "custom_obj_0", data), "stores added as a pickle"),
        "an opaque object": (_payload(CONSTANTS, "opaque_obj_0", pickle.dumps(Runs(marker))), "stores added as a pickle"),
        "all weights": (lambda m: {**m, "m/data/weights/model.pt": data}, "weights as a pickle"),
        "all constants": (lambda m: {**m, "m/data/constants/model.pt": data}, "constants as a pickle"),
        "the layout of old releases": (old, "2.9 or newer"),
        "a symbolic size": (_graph(sized), "is not an expression of sizes"),
        "the name of an input": (_graph(named), "is not a name"),
        "the name of a parameter": (weighted, "is not the name of a tensor"),
        "the name of an argument": (_graph(called), "is not a name"),
        "a container's factory": (_graph(imports), None),
        "a container's keys": (_graph(enumerated), "a dictionary of a value for each key"),
        "an operator": (_graph(calls), "torch.os.system is no operator"),
        "an operator that makes a file": (_graph(opens), "no operator"),
        "guards": (guarded, "is not a"),
    }


@pytest.mark.parametrize("what", hostile_files(Path()))
def test_nothing_of_a_file_is_run(
    what: str, linear: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "imported_by_a_file.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    hostile, words = hostile_files(marker)[what]
    path = write(tmp_path / "m.pt2", hostile(linear))
    if words is None:
        import_exported(load_exported(path))
        load_exported(path).module()(torch.ones(2, 4))
    else:
        assert main(["compile", str(path)]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err and "m.pt2" in err, err
    assert not marker.exists()


def test_the_hostile_files_are_hostile(linear: Members, tmp_path: Path) -> None:
    """PyTorch's own reader runs them: otherwise the test above would show nothing."""
    marker = tmp_path / "marker"
    hostile, _ = hostile_files(marker)["sample inputs"]
    try:
        torch.export.load(str(write(tmp_path / "m.pt2", hostile(linear))))
    except Exception:
        pass
    assert marker.exists()


# Files that are damaged or request too much


def _weight(**fields: Any) -> Callable[[Members], Members]:
    return lambda members: changed(members, WEIGHTS, lambda d: d["config"]["weight"].update(fields))


def _meta(**fields: Any) -> Callable[[Members], Members]:
    return lambda members: changed(members, WEIGHTS, lambda d: d["config"]["weight"]["tensor_meta"].update(fields))


def _sizes(*sizes: Any) -> list[Any]:
    return [{"as_int": size} for size in sizes]


def _nodes(change: Callable[[list[Any]], None]) -> Callable[[Members], Members]:
    return _graph(lambda module: change(module["graph"]["nodes"]))


DAMAGED: dict[str, tuple[Callable[[Members], Members], str]] = {
    "sizes beyond the storage": (_meta(sizes=_sizes(5, 4)), "larger than its storage"),
    "a stride beyond the storage": (_meta(strides=_sizes(1 << 40, 1)), "larger than its storage"),
    "a negative size": (_meta(sizes=_sizes(-1, 4)), "not a size"),
    "a negative stride": (_meta(strides=_sizes(-4, 1)), "not a size"),
    "a negative offset": (_meta(storage_offset={"as_int": -1}), "not a size"),
    "repeated elements": (_meta(sizes=_sizes(1 << 20, 1 << 20), strides=_sizes(0, 0)), "repeat"),
    "a size of text": (_meta(sizes=_sizes("4", 4)), "not a size"),
    "dimensions without end": (_meta(sizes=_sizes(*[1 << 40] * 80_000), strides=_sizes(*[1] * 80_000)), "size that fits"),
    "too many dimensions": (_meta(sizes=_sizes(*[1] * 65), strides=_sizes(*[1] * 65)), "size that fits"),
    "other strides": (_meta(strides=_sizes(1)), "size that fits"),
    "an element type": (_meta(dtype=99), "cannot be read"),
    "an element type of another size": (_meta(dtype=8), "larger than its storage"),
    "sparse": (_meta(layout=1), "sparse"),
    "a device": (_meta(device={"type": "tpu", "index": None}), "cpu or cuda"),
    "a path out of the archive": (_weight(path_name="../../../etc/passwd"), "not the name of a member"),
    "an absent member": (_weight(path_name="weight_77"), "has no data/weights/weight_77"),
    "another weight's data": (_weight(path_name="weight_1"), "its storage"),
    "no configuration": (lambda m: {k: v for k, v in m.items() if k != WEIGHTS}, "has no data/weights"),
    "no program": (lambda m: {k: v for k, v in m.items() if k != PROGRAM}, "has no models/model.json"),
    "another format": (lambda m: {**m, "m/archive_format": b"pt3"}, "no .pt2 archive"),
    "big-endian": (lambda m: {**m, "m/byteorder": b"big"}, "big-endian"),
    "no JSON": (lambda m: {**m, PROGRAM: b'{"graph_module": '}, "cannot be read"),
    "a list": (lambda m: {**m, PROGRAM: b"[]"}, "not a record"),
    "deep JSON": (lambda m: {**m, PROGRAM: b"[" * 100_000 + b"]" * 100_000}, "nested too deeply"),
    "a number of many digits": (lambda m: {**m, PROGRAM: b'{"a": ' + b"9" * 5000 + b"}"}, "cannot be read"),
    "an unknown operator": (_nodes(lambda n: n[0].update(target="torch.ops.aten.linears.default")), "has no operator"),
    "an operator of a library": (_nodes(lambda n: n[0].update(target="torch.ops.prims.add.default")), "only those of ATen"),
    "a branch": (_nodes(lambda n: n[0].update(target="torch.ops.higher_order.cond")), "sub-program"),
    "an argument that nothing computes": (_nodes(lambda n: n[0]["inputs"][0]["arg"].update(as_tensor={"name": "y"})), "cannot be read"),
    "a cycle": (_nodes(lambda n: n[0]["inputs"][0]["arg"].update(as_tensor={"name": "linear"})), "cannot be read"),
    "a name twice": (_nodes(lambda n: n.append(n[0])), "cannot be read"),
    "no outputs": (_graph(lambda g: g["graph"]["outputs"].clear()), "not those of the signature"),
    "an input more": (_graph(lambda g: g["signature"]["input_specs"].append(g["signature"]["input_specs"][-1])), "the numbers of inputs"),
    "a weight of another shape": (_meta(sizes=_sizes(3, 2)), "reduction dim"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_programs_are_one_line(what: str, linear: Members, tmp_path: Path) -> None:
    change, words = DAMAGED[what]
    with pytest.raises(TilewrightError, match=words) as caught:
        import_exported(load_exported(write(tmp_path / "m.pt2", change(linear))))
    assert "m.pt2" in str(caught.value) and "\n" not in str(caught.value) and caught.value.remedy


def test_archives_that_inflate(linear: Members, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**linear, "m/data/weights/weight_0": bytes(1 << 24)}.items():
            archive.writestr(name, data)
    with pytest.raises(InvalidModel, match="compressed"):
        import_exported(load_exported(tmp_path / "m.pt2"))
    with zipfile.ZipFile(tmp_path / "twice.pt2", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*linear, PROGRAM):
            archive.writestr(name, linear[name])
    with pytest.raises(InvalidModel, match="the same name"):
        import_exported(load_exported(tmp_path / "twice.pt2"))


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.pt2")
    for path in (tmp_path / "fifo.pt2", tmp_path):
        with pytest.raises(InvalidModel, match="not a file"):
            import_exported(load_exported(path))


def test_containers_of_other_types_need_a_trusted_load(tmp_path: Path) -> None:
    path = exported(tmp_path / "m.pt2", Function(lambda x: x + 1), torch.ones(2))
    members = {name: zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist()}

    def other(document: Any) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = json.dumps([1, {"type": "some.Result", "context": "[]", "children_spec": [json.loads(signature["out_spec"])[1]]}])

    with pytest.raises(UnsupportedOperator, match=r"some\.Result.*torch\.export\.load"):
        import_exported(load_exported(write(path, changed(members, PROGRAM, other))))


TRUSTING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "an index that a backward pass believes": lambda x, i: torch.ops.aten.max_pool2d_with_indices_backward.default(
        x[:, :, :1, :1], x, [2, 2], [2, 2], [0, 0], [1, 1], False, i
    ),
    "a number of elements that is believed": lambda x, i: torch.ops.aten.repeat_interleave.Tensor(i.flatten(), output_size=1),
}
"""Operators that read or write at unchecked positions given by values."""


@pytest.mark.parametrize("what", TRUSTING)
def test_operators_that_trust_their_arguments_are_refused(what: str, tmp_path: Path) -> None:
    inputs = (torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 1, 1, dtype=torch.long))
    path = exported(tmp_path / "model.pt2", Function(TRUSTING[what]), *inputs)
    with pytest.raises(InvalidModel, match=r"model\.pt2: operator aten.* is none that a file may name; give the module itself") as caught:
        tilewright.compile(path)
    assert "\n" not in str(caught.value)


HUGE = 1 << 30
FANS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unbind": lambda x: x.expand(4).unbind()[0],
    "split": lambda x: x.expand(4).split(1)[0],
    "chunks": lambda x: torch.zeros(4).chunk(4)[0] + x,
    "sections": lambda x: x.tensor_split(4)[0],
}


@pytest.mark.parametrize("what", FANS)
def test_very_many_tensors_of_one_are_refused(what: str, tmp_path: Path) -> None:
    path = exported(tmp_path / "m.pt2", Function(FANS[what]), torch.ones(1))
    members = {name: zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist()}

    def huge(document: Any) -> None:
        text = json.dumps(document["graph_module"]["graph"]["nodes"]).replace('"as_int": 4', f'"as_int": {HUGE}').replace("[4]", f"[{HUGE}]")
        document["graph_module"]["graph"]["nodes"] = json.loads(text)

    with limited(60), pytest.raises(InvalidModel, match=rf"makes {HUGE:,} tensors of one") as caught:
        import_exported(load_exported(write(path, changed(members, PROGRAM, huge))))
    assert "\n" not in str(caught.value)
