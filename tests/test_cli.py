"""The command line: models by name, every command on small models, and errors of one line."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tilewright import models
from tilewright.cli import main
from tilewright.errors import InvalidModel, UnknownModel, UnsupportedOption
from tilewright.ir.graph import place_text, short_place
from tilewright.report.explanation import explanation, layout_text
from tilewright.text import counts_text, scaled, seconds_text

MODULE_TEXT = """
import torch
from torch import nn

class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))

def perceptron(batch=1):
    return Perceptron(), (torch.randn(batch, 6),)

def fixed():
    return Perceptron(), torch.randn(2, 6)

def alone():
    return Perceptron()

def number():
    return 3

class RisingSums(nn.Module):
    def forward(self, x):
        return torch.cummax(x + x.sum(), 1)[0]

def rising_sums():
    return RisingSums(), torch.randn(2, 6)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel cache for this module alone."""
    folder = tmp_path_factory.getbasetemp() / "cli-cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Puts a module of sample models on the path."""
    (tmp_path / "sample_models.py").write_text(MODULE_TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("sample_models", None)


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a failing command: one line, and nothing else, on standard error."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("tilewright: error: ")
    return lines[0].removeprefix("tilewright: error: ")


def test_compile_explain_and_verify_an_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = str(tmp_path / "model.zip")
    assert main(["compile", "sample_models:perceptron", "--batch", "3", "-o", artifact]) == 0
    printed = capsys.readouterr().out
    assert "contraction" in printed and "linear" in printed and artifact in printed
    assert tilewright.load(artifact)(torch.zeros(3, 6)).shape == (3, 4)

    page = tmp_path / "page.html"
    assert main(["explain", artifact, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    for words in ("nodes", "schedule", "predicted", "because", "row-major", "Nothing runs through PyTorch", "Memory: "):
        assert words in text
    assert "predicted" in page.read_text()

    assert main(["verify", artifact]) == 0
    assert "the 1 value agrees with float64" in capsys.readouterr().out
    assert main(["verify", artifact, "--tolerance", "0", "--all"]) == 1
    assert "first wrong: region" in capsys.readouterr().out


def test_options_of_building_beside_an_artifact_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = str(tmp_path / "model.tilewright")
    assert main(["compile", "sample_models:perceptron", "-o", artifact]) == 0
    capsys.readouterr()
    for command in (["explain"], ["verify"], ["verify", "--no-run"], ["profile"], ["explain", "--profile"]):
        line = error_line(capsys, *command, artifact, "--precision", "bf16", "--no-winograd", "--input", "1x6")
        assert f"{artifact} is an artifact" in line and "--input, --precision, --no-winograd; leave them out" in line
    for command in (["explain"], ["explain", "--fusion"], ["verify", "--no-run"]):
        assert "would use --threads; leave it out" in error_line(capsys, *command, "--threads", "2", artifact)
    assert main(["verify", "--threads", "2", artifact]) == 0
    capsys.readouterr()
    assert "are artifacts" in error_line(capsys, "explain", artifact, "--against", artifact, "--batch", "2")
    assert main(["explain", "sample_models:perceptron", "--against", artifact, "--batch", "2"]) == 0


def test_commands_on_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "sample_models:fixed"]) == 0
    assert "inner" in capsys.readouterr().out  # the module's name is part of a node's place
    assert main(["verify", "sample_models:fixed", "--seed", "5"]) == 0
    assert main(["verify", "sample_models:alone", "--input", "2x6"]) == 0
    capsys.readouterr()


def test_exported_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(nn.Sequential(nn.Linear(5, 3), nn.ReLU()), (torch.randn(2, 5),)), path)
    assert main(["verify", str(path)]) == 0
    assert main(["bench", str(path), "--against", "eager", "--rounds", "1", "--seconds", "0.001"]) == 0
    assert "tilewright" in capsys.readouterr().out
    assert "own input shapes" in error_line(capsys, "compile", str(path), "--batch", "2")
    path.write_bytes(path.read_bytes()[:100])
    assert f"{path} cannot be read: " in error_line(capsys, "compile", str(path))


def test_files_with_free_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx
    from onnx import helper

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + y).softmax(1)

    path = tmp_path / "pair.pt2"
    free = {0: torch.export.Dim.DYNAMIC}
    torch.export.save(torch.export.export(Pair(), (torch.randn(2, 5), torch.randn(2, 5)), dynamic_shapes=(free, free)), path)
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("batch", 5)) for name in "xyz"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "y"], ["z"])], "pair", ports[:2], ports[2:])
    other = tmp_path / "pair.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), other)
    for file in (path, other):
        assert main(["verify", str(file), "--batch", "3"]) == 0
        assert main(["verify", str(file), "--input", "4x5", "--input", "4x5"]) == 0
        capsys.readouterr()
        assert "--input" in error_line(capsys, "compile", str(file))
    for given in (path, str(other), torch.export.load(path), onnx.load(other)):
        inputs = torch.randn(3, 5), torch.randn(3, 5)
        wanted = sum(inputs) if isinstance(given, (str, onnx.ModelProto)) else Pair()(*inputs)
        for dynamic in (None, True):
            executable = tilewright.compile(given, batch=3, dynamic=dynamic)
            torch.testing.assert_close(executable(*inputs), wanted)
        with pytest.raises(UnsupportedOption, match=r"dimension 1 of x, which is not free in the model; .*free sizes are (x.shape\[0\]|batch)"):
            tilewright.compile(given, inputs, dynamic={"x": {1: "b"}})
        with pytest.raises(UnsupportedOption, match="has example_inputs"):
            tilewright.compile(given, inputs, batch=3)
    fixed = torch.export.export(Pair(), inputs)
    with pytest.raises(UnsupportedOption, match="a batch is given, and this ExportedProgram has its own input shapes"):
        tilewright.compile(fixed, batch=3)
    with pytest.raises(InvalidModel, match="no size of the model is free; .*export it with free sizes"):
        tilewright.compile(fixed, dynamic=True)
    wide = torch.export.export(Pair(), (torch.randn(2, 5), torch.randn(2, 5)), dynamic_shapes=({0: free[0], 1: free[0]},) * 2)
    torch.export.save(wide, path)
    assert "x.shape[1] of" in error_line(capsys, "compile", str(path), "--batch", "2")


def test_onnx_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx
    from onnx import helper

    weights = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((5, 3), dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", (2, 5)), ("z", (2, 3)))]
    graph = helper.make_graph(nodes, "small", ports[:1], ports[1:], [weights])
    path = tmp_path / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    assert main(["verify", str(path)]) == 0
    assert "agrees with float64" in capsys.readouterr().out
    assert main(["bench", str(path), "--against", "eager,onnxruntime", "--rounds", "1", "--seconds", "0.001"]) == 0
    printed = capsys.readouterr().out
    assert "eager unavailable: an ONNX file holds no PyTorch module" in printed
    if importlib.util.find_spec("onnxruntime") is not None:
        assert re.search(r"onnxruntime +[\d.]+ ± ", printed)
    path.write_bytes(path.read_bytes()[:40])
    assert str(path.name) in error_line(capsys, "compile", str(path))


def test_compile_for_a_gpu_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    artifact = str(tmp_path / "model")
    assert main(["compile", "sample_models:fixed", "--target", "h200", "-o", artifact]) == 0
    assert main(["explain", artifact]) == 0
    text = capsys.readouterr().out
    assert "for h200 (sm_90a)" in text and "launch" in text
    assert "h200" in error_line(capsys, "verify", artifact)


def test_what_runs_through_pytorch_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "sample_models:rising_sums"]) == 0
    captured = capsys.readouterr()
    assert "warning" in captured.err and "aten.cummax" in captured.err
    assert "Through PyTorch:\n   aten.cummax" in captured.out and "not counted" in captured.out
    assert "aten.cummax" in error_line(capsys, "compile", "sample_models:rising_sums", "--strict")


def test_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    arguments = ["bench", "sample_models:perceptron", "--against", "eager,openvino", "--rounds", "2", "--seconds", "0.001"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "eager" in printed and "unavailable: the package openvino is not installed" in " ".join(printed.split())
    assert "choose from eager" in error_line(capsys, *arguments[:2], "--against", "tensorflow")
    # if ours is wrong it is not timed, and the exit code says so
    assert main([*arguments, "--tolerance", "0"]) == 1


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean lenet5" in error_line(capsys, "compile", "zoo:lenet4")
    assert "zoo:lenet5" in error_line(capsys, "explain", "lenet5")
    assert "did you mean h200" in error_line(capsys, "compile", "zoo:lenet5", "--target", "h20")
    assert "is not supported" in error_line(capsys, "compile", "zoo:lenet5", "--precision", "fp8")
    assert "is for GPUs" in error_line(capsys, "compile", "zoo:lenet5", "--precision", "fp16", "--target", "x86-avx2")
    assert "needs AVX512-BF16" in error_line(capsys, "compile", "zoo:lenet5", "--precision", "bf16", "--target", "x86-avx512")
    assert "there is no file" in error_line(capsys, "compile", "missing.onnx")
    os.mkfifo(tmp_path / "pipe.pt2")
    assert "pipe.pt2 is no regular file" in error_line(capsys, "compile", str(tmp_path / "pipe.pt2"))
    assert "artifact" in error_line(capsys, "explain", str(tmp_path / "missing.zip"))
    assert "is a folder without manifest.json, and so no artifact" in error_line(capsys, "verify", str(tmp_path))
    assert error_line(capsys, "compile", "zoo:nosuch").endswith("the zoo has no network 'nosuch'; `python -m tilewright.zoo` lists them")
    assert "no meaning" in error_line(capsys, "cache", "show", "--all")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error_line(capsys, "explain", "sample_models:fixed", "--html", str(tmp_path / "file" / "page.html"))


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(UnknownModel):
        main(["compile", "zoo:lenet4", "--debug"])


def test_interruption_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "resolve", interrupt)
    assert main(["compile", "zoo:lenet5"]) == 130
    assert capsys.readouterr().err == "tilewright: interrupted\n"


def test_unexpected_errors_are_one_line_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr(models, "resolve", fail)
    assert error_line(capsys, "compile", "zoo:lenet5").startswith("unexpected ZeroDivisionError with zoo:lenet5: first; this is a fault")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    capsys.readouterr()
    assert main(["--help"]) == 0
    assert "tilewright verify resnet18.zip" in capsys.readouterr().out
    for command in ("compile", "bench", "explain", "verify", "tune", "records", "targets", "cache"):
        assert main([command, "--help"]) == 0
    capsys.readouterr()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tilewright {tilewright.__version__}\n"


WRONG_USAGE: dict[str, tuple[Sequence[str], str]] = {
    "nothing": ([], "required: COMMAND; see `tilewright --help`"),
    "no such command": (["compyle"], "invalid choice"),
    "no model": (["compile"], "required: MODEL; see `tilewright compile --help`"),
    "an unknown option": (["compile", "zoo:lenet5", "--speed", "9"], "unrecognized arguments: --speed 9"),
    "lines and escapes": (["targets", "--\n\x1b[2J"], "-- \\x1b[2J"),
    "a target with a space": (["compile", "zoo:lenet5", "--target", "h 200"], "did you mean h200"),
    "an empty target": (["compile", "zoo:lenet5", "--target", ""], "names nothing"),
    "an empty model": (["explain", ""], "names nothing"),
    "a blank model": (["verify", " "], "names nothing"),
    "a model with a NUL": (["verify", "a\0.onnx"], "names nothing"),
    "a tune of nothing": (["tune", ""], "names nothing"),
    "a batch of nothing": (["batch", "", "--targets", "h200", "-o", "x"], "names nothing"),
    "batch 0": (["compile", "zoo:lenet5", "--batch", "0"], "'0' is no whole number from 1 up"),
    "batch -1": (["batch", "zoo:lenet5", "--targets", "h200", "-o", "x", "--batch", "-1"], "'-1' is no whole number from 1 up"),
    "a superscript": (["tune", "zoo:lenet5", "--batch", "²"], "'²' is no whole number"),
    "a huge batch": (["compile", "zoo:lenet5", "--batch", "9" * 5000], "is no whole number"),
    "a huge input": (["compile", "zoo:lenet5", "--input", "99999999999999999999x3"], "elements"),
    "too large an input": (["compile", "zoo:lenet5", "--input", "1000000x1000000x1000000"], "elements"),
    "an input of an odd dtype": (["verify", "zoo:lenet5", "--input", "2:quint8"], "quint8"),
    "threads 0": (["bench", "zoo:lenet5", "--threads", "0"], "no whole number from 1 up"),
    "threads": (["compile", "zoo:lenet5", "--threads", "99999"], "pass a whole number from 1 to 1024"),
    "trials": (["compile", "zoo:lenet5", "--trials", "-1"], "no whole number from 0 up"),
    "trials of tune": (["tune", "zoo:lenet5", "--trials", "0"], "no whole number from 1 up"),
    "seed": (["verify", "zoo:lenet5", "--seed", "-1"], "'-1' is no whole number from 0 to 9223372036854775807"),
    "a huge seed": (["train", "--seed", str(1 << 64)], "no whole number"),
    "tolerance": (["verify", "zoo:lenet5", "--tolerance", "nan"], "'nan' is no number from 0 up"),
    "endless rounds": (["bench", "zoo:lenet5", "--seconds", "inf"], "'inf' is no number from 0 up"),
    "a limit": (["cache", "prune", "--limit", "-3"], "'-3' is no number from 0 up"),
    "an action": (["cache", "burn"], "invalid choice: 'burn'"),
    "devices": (["tune", "zoo:lenet5", "--target", "h200", "--devices", "²"], "no list of indices"),
    "a part": (["tune", "zoo:lenet5", "--target", "h200", "--part", "²/3"], "is no part"),
    "no target at all": (["batch", "zoo:lenet5", "--targets", "h200,,", "-o", "x"], "unknown target ''"),
    "a scheduler": (["batch", "zoo:lenet5", "--targets", "h200", "-o", "x", "--scheduler", ""], "names nothing"),
    "seconds": (["train", "--collect", "x", "--seconds", "nan"], "no number from 0 up"),
    "export into a folder": (["tune", "--export", "{folder}"], "is a directory"),
    "export over what is imported": (["tune", "--import", "{file}", "--export", "{file}"], "is read by the same command"),
    "export over the records": (["tune", "--records", "{file}", "--export", "{file}"], "is read by the same command"),
    "export below a file": (["tune", "--export", "{file}/x"], "cannot be written"),
    "a page over a model": (["explain", "{file}", "--html", "{file}"], "is read by the same command"),
    "a page below a file": (["explain", "zoo:lenet5", "--html", "{file}/x"], "cannot be written"),
    "an artifact below a file": (["compile", "zoo:lenet5", "-o", "{file}/x.zip"], "cannot be written"),
    "an artifact over a model": (["compile", "{file}", "-o", "{file}"], "is no artifact"),
    "a trained model over its data": (["train", "{file}", "--model", "{file}"], "is read by the same command"),
    "a page in a device": (["explain", "zoo:lenet5", "--html", "/dev/null"], "no regular file"),
    "a long name": (["explain", "x" * 5000 + ".onnx"], "File name too long"),
}


@pytest.mark.parametrize("what", WRONG_USAGE)
def test_wrong_usage_is_one_line(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, words = WRONG_USAGE[what]
    file = tmp_path / "file.onnx"
    file.write_text("some model")
    monkeypatch.chdir(tmp_path)
    line = error_line(capsys, *(argument.replace("{file}", str(file)).replace("{folder}", str(tmp_path)) for argument in arguments))
    assert words in line and "fault in tilewright" not in line and line.isprintable()
    assert file.read_text() == "some model" and {path.name for path in tmp_path.iterdir()} <= {"file.onnx", "sample_models.py", "__pycache__"}


def test_what_goes_nowhere_is_quiet(cache: Path) -> None:
    for output in ("| head -c 1", ">&-", "| true"):
        command = f"set -o pipefail; {sys.executable} -m tilewright targets --sources {output}; echo $? >&2"
        done = subprocess.run(["bash", "-c", command], capture_output=True)
        assert done.stderr == b"0\n", output
    full = subprocess.run(["bash", "-c", f"{sys.executable} -m tilewright targets > /dev/full"], capture_output=True, text=True)
    assert full.returncode == 2 and full.stderr.startswith("tilewright: error: ") and full.stderr.count("\n") == 1 and "No space left" in full.stderr


def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    printed = capsys.readouterr().out
    assert "h200" in printed and "native" in printed and "cortex-a53" in printed
    assert main(["targets", "h200", "--sources"]) == 0
    printed = capsys.readouterr().out
    assert "shared_bytes_per_block" in printed and "source" in printed


def test_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "sample_models:perceptron"]) == 0
    assert main(["cache"]) == 0
    assert str(cache) in capsys.readouterr().out
    assert main(["cache", "check"]) == 0
    for binary in cache.rglob("kernel.so"):  # the runner is among them, and this process has mapped them all
        binary.write_bytes(b"damaged")
    assert main(["cache", "check"]) == 1
    assert main(["verify", "sample_models:perceptron"]) == 0  # built again
    assert main(["cache", "prune", "--all"]) == 0
    capsys.readouterr()
    assert main(["cache", "show"]) == 0
    assert capsys.readouterr().out.startswith("0 kernels")


def test_models_by_name() -> None:
    assert models.resolve("zoo:lenet5", batch=2).inputs(0)[0].shape == (2, 1, 28, 28)  # type: ignore[misc]
    model = models.resolve("sample_models:perceptron", batch=4)
    assert model.inputs is not None and not model.module.training
    first, again, other = model.inputs(1)[0], model.inputs(1)[0], model.inputs(2)[0]
    assert first.shape == (4, 6) and torch.equal(first, again) and not torch.equal(first, other)
    drawn = models.resolve("sample_models:alone", inputs=["2x6", "3:int64", "scalar:bool"]).inputs
    assert drawn is not None
    assert [(tuple(x.shape), x.dtype) for x in drawn(0)] == [((2, 6), torch.float32), ((3,), torch.int64), ((), torch.bool)]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("zoo:resnet81", UnknownModel, "resnet18"),
        ("sample_models:perceptrom", UnknownModel, "perceptron"),
        ("sample_models:alone", InvalidModel, "--input"),
        ("sample_models:number", InvalidModel, "returned int"),
        ("no_such_package:thing", UnknownModel, "cannot be imported"),
        ("tochvision:resnet18", UnknownModel, "torchvision:resnet18"),
        ("some model", UnknownModel, "zoo:NAME"),
    ],
)
def test_names_that_lead_nowhere(text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        models.resolve(text)


def test_absent_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UnknownModel, match=f"{package} is not installed; pip install {package}"):
            models.resolve(f"{package}:resnet18")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('raise RuntimeError("operator torchvision::nms does not exist")', "torchvision's compiled operators do not load with PyTorch"),
        ("import no_such_dependency.part", "pip install no_such_dependency, which it needs"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("package", ["timm", "a_package_of_others"])
def test_misfortunes_of_other_packages_are_named_as_theirs(
    source: str, words: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises((UnknownModel, InvalidModel), match=re.escape(words)) as caught:
        models.resolve(f"{package}:thing")
    assert package in caught.value.cause


def test_names_work_in_python() -> None:
    executable = tilewright.compile("zoo:lenet5", batch=3)
    (images,) = models.resolve("zoo:lenet5", 3).inputs(1)  # type: ignore[misc]
    module = models.resolve("zoo:lenet5", 3).module
    torch.testing.assert_close(executable(images).double(), module.double()(images.double()), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnknownModel, match="did you mean zoo:lenet5"):
        tilewright.compile("lenet5")
    with pytest.raises(UnsupportedOption, match="batch=3 is given, and it has example_inputs"):
        tilewright.compile(nn.Linear(2, 2), (torch.zeros(1, 2),), batch=3)
    with pytest.raises(UnsupportedOption, match="batch=3 is given, and a module has no inputs"):
        tilewright.compile(nn.Linear(2, 2), batch=3)
    with pytest.raises(UnsupportedOption, match="batch=0 is no number"):
        tilewright.compile("zoo:lenet5", batch=0)
    for options in ({}, {"batch": 2}, {"dynamic": True}):
        with pytest.raises(InvalidModel, match="a set is no model"):
            tilewright.compile({1}, **options)


def test_wrong_options_of_a_model() -> None:
    with pytest.raises(UnsupportedOption, match="no parameter 'batch'"):
        models.resolve("sample_models:fixed", batch=2)
    with pytest.raises(UnsupportedOption, match="is no shape"):
        models.resolve("sample_models:fixed", inputs=["2,6"])


def test_figures_of_a_linear_layer() -> None:
    executable = tilewright.compile(nn.Linear(16, 8, bias=False), (torch.randn(4, 16),))
    figures = executable.plan.work
    assert figures.flops == 2 * 4 * 16 * 8
    assert figures.bytes_read == 4 * (4 * 16 + 16 * 8) and figures.bytes_written == 4 * 4 * 8
    assert explanation(executable.image, "linear").startswith("linear for native")


def test_texts() -> None:
    from tilewright.ir.layout import channels_last, row_major

    assert scaled(12_345_678, "B") == "12.3 MB" and scaled(0, "flop") == "0 flop" and scaled(999_900, "B") == "1000 kB"
    assert [seconds_text(s) for s in (0.0, 7.05e-4, 1.5, 3e-9, -1.21e-6)] == ["-", "705 us", "1.5 s", "3 ns", "-1.21 us"]
    counts = {"stores": 2.0, "loads": 1234.0, "spills": 0.0, "branches": 2.0, "moves": 12.345}
    assert counts_text(counts) == "1,234 loads, 12.35 moves, 2 stores, 2 branches"
    assert layout_text(row_major((2, 3))) == "row-major" and layout_text(channels_last((1, 2, 3, 4))) == "N H W C"
    halo = channels_last((1, 2, 3, 4)).with_halo(((0, 0), (0, 0), (1, 1), (2, 2)))
    assert layout_text(halo) == "N H W C with a zeroed halo (H 1+1, W 2+2)"
    assert place_text("layer1.0.conv1 (/x/site-packages/torch/nn/modules/conv.py:1)") == "layer1.0.conv1"
    assert place_text("layer1 (/home/net.py:7)") == "layer1 (/home/net.py:7)"
    assert place_text("(/x/site-packages/torch/nn/modules/activation.py:1873)") == "" and place_text("layer1") == short_place("layer1") == "layer1"
    assert [short_place(place) for place in ("layer1 (/home/net.py:7)", "(/home/my nets/net.py:7)", "")] == ["layer1", "(net.py:7)", ""]


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "tilewright"]
    done = subprocess.run([*command, "compile", "zoo:lenet4"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("tilewright: error: ") and "Traceback" not in done.stderr
    code = "import sys; from tilewright.cli import main; main(['targets']); main(['cache']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
