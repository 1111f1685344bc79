"""User mistakes and failures of the environment: each gives one clear error, or right results all the same."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import tilewright
from tilewright import compile as compile_module
from tilewright.cli import main
from tilewright.codegen import interpreter
from tilewright.errors import InvalidArtifact, InvalidInput, InvalidModel, KernelFailed, TilewrightError, UnknownTarget, UnsupportedOption
from tilewright.runtime import artifact
from tilewright.runtime.executable import Executable

pipeline = sys.modules["tilewright.compile"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Function(nn.Module):
    """A module of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


class Options(nn.Module):
    """Default arguments, and a result of tensors, numbers, strings and None."""

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor | None = None, *, flag: bool = True) -> Any:
        y = x * scale if bias is None else x * scale + bias
        return (y, None, 3, {"a": y.sum(), "b": [y.mean(), {"c": "text", "d": 2.5}]}) if flag else y


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5), nn.Softmax(1)]
    return nn.Sequential(*layers).eval()


def agree(ours: Any, theirs: Any) -> None:
    mine, shape = pytree.tree_flatten(ours)
    other, expected = pytree.tree_flatten(theirs)
    assert shape == expected
    for a, b in zip(mine, other, strict=True):
        if isinstance(b, Tensor):
            relative, absolute = {torch.float16: (1e-3, 1e-4), torch.bfloat16: (1e-2, 1e-3)}.get(b.dtype, (1e-4, 1e-5))  # values between are float32
            torch.testing.assert_close(a, b, rtol=relative, atol=absolute, equal_nan=True)
        else:
            assert type(a) is type(b) and a == b


# Arguments of a call


def test_defaults_may_be_passed_and_nothing_else(tmp_path: Path) -> None:
    x, scale = torch.randn(3, 4), torch.randn(4)
    executable = tilewright.compile(Options(), (x, scale))
    executable.save(tmp_path / "a.zip")
    for exe in (executable, tilewright.load(tmp_path / "a.zip")):
        for call in (
            lambda e: e(x, scale), lambda e: e(x, scale=scale), lambda e: e(x, scale, None), lambda e: e(x, scale, bias=None, flag=True),
            lambda e: e(scale=scale, x=x, flag=True),
        ):  # fmt: skip
            agree(call(exe), call(Options()))
        with pytest.raises(InvalidInput, match="flag.*default True, got False"):
            exe(x, scale, flag=False)
        with pytest.raises(InvalidInput, match="bias.*default None, got a float32 tensor"):
            exe(x, scale, x)
        with pytest.raises(InvalidInput, match="scalex"):
            exe(x, scalex=scale)
        with pytest.raises(InvalidInput, match="got 4"):
            exe(x, scale, None, True)


def test_a_written_input_shares_memory_with_no_other() -> None:
    executable = tilewright.compile(Function(lambda a, b: (a.add_(1), b * 2)[1]), (torch.randn(3), torch.randn(3)))
    x = torch.randn(6)
    for a, b in ((x, x), (x[:3], x[3:])):
        before = x.clone()
        with pytest.raises(InvalidInput, match=r"input args\[0\] and input args\[1\] share memory"):
            executable(a[:3], b[:3])
        assert torch.equal(x, before)
    agree(executable(x[:3].clone(), x[3:]), x[3:] * 2)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 8)


def _released() -> torch.Tensor:
    tensor = torch.ones(4, 8)
    tensor.untyped_storage().resize_(0)
    return tensor


def _masked() -> torch.Tensor:
    return torch.masked.masked_tensor(torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bool))


NOWHERE: dict[str, Callable[[Executable], object]] = {
    "a fake tensor": lambda executable: executable(_fake()),
    "a fake tensor in other strides": lambda executable: executable(_fake().view(8, 4).t()),
    "a fake tensor that is verified": lambda executable: executable.verify(_fake()),
    "a tensor whose storage was released": lambda executable: executable(_released()),
    "a tensor that wraps others": lambda executable: executable(_masked()),
    "zeros that are nowhere": lambda executable: executable(torch._efficientzerotensor(4, 8)),
    "a batch of a transformation": lambda executable: torch.vmap(executable)(torch.ones(2, 4, 8)),
    "a tensor that is made functional": lambda executable: torch.func.functionalize(executable)(torch.ones(4, 8)),
}


@pytest.mark.filterwarnings("ignore:.*MaskedTensors:UserWarning", "ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("how", NOWHERE)
def test_a_tensor_without_memory_is_refused(doubled: Executable, how: str) -> None:
    """Kernels would read from address 0."""
    with pytest.raises(InvalidInput, match=r"args\[0\] has no memory"):
        NOWHERE[how](doubled)
    agree(doubled(torch.ones(4, 8)), torch.full((4, 8), 2.0))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("how", ["released", "a released buffer", "fake", "in a mode"])
def test_a_module_without_memory_is_refused(how: str) -> None:
    def scaled(scale: torch.Tensor, *, changes: bool = False) -> nn.Module:
        module: Any = Function(lambda x: x * (module.scale.add_(1) if changes else module.scale))
        module.register_buffer("scale", scale)
        return module

    module = scaled(torch.ones(8), changes=how == "a released buffer")
    mode: Any = nullcontext()
    if "released" in how:
        module.get_buffer("scale").untyped_storage().resize_(0)
    elif how == "fake":
        module.register_buffer("scale", _fake()[0])
    else:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises(InvalidModel, match=r"scale, a .* of shape \[8\], has no memory|cannot be exported"):
        tilewright.compile(module, torch.ones(4, 8))


def test_compiling_where_tensors_have_no_values() -> None:
    module, x = nn.ReLU(), torch.randn(3)
    with torch.device("meta"), pytest.raises(InvalidInput, match="'meta', whose tensors hold no values.*compile outside"):
        tilewright.compile(module, (x,))


def test_a_module_of_inference_tensors() -> None:
    with torch.inference_mode():
        module = nn.Linear(8, 4)
        executable = tilewright.compile(module, torch.ones(2, 8))
        agree(executable(torch.ones(2, 8)), module(torch.ones(2, 8)))
    assert not executable.is_stale(module)


def test_a_tangent_is_not_lost(doubled: Executable) -> None:
    with pytest.raises(InvalidInput, match=r"args\[0\] has a tangent"):
        torch.func.jvp(doubled, (torch.ones(4, 8),), (torch.ones(4, 8),))
    with forward_ad.dual_level():
        agree(doubled(torch.ones(4, 8)), torch.full((4, 8), 2.0))
        with pytest.raises(InvalidInput, match=r"args\[0\] has a tangent"):
            doubled(forward_ad.make_dual(torch.ones(4, 8), torch.ones(4, 8)))


@pytest.fixture(scope="module")
def doubled() -> Executable:
    return tilewright.compile(Function(lambda x: x * 2), torch.ones(4, 8), threads=1)


@pytest.mark.parametrize("threads", [0, -1, "2", 2.0, True, 10**6])
def test_threads_are_a_number(threads: Any) -> None:
    with pytest.raises(UnsupportedOption, match="threads"):
        tilewright.compile(nn.Linear(2, 2), torch.ones(1, 2), threads=threads)
    executable = tilewright.compile(nn.Linear(2, 2), torch.ones(1, 2), threads=1)
    with pytest.raises(UnsupportedOption, match="threads"):
        executable.threads = threads
    assert executable.threads == 1


def test_arrays_are_no_tensors(doubled: Executable) -> None:
    array: Any = torch.zeros(2, 3).numpy()
    module = Function(torch.relu)
    remedy = r"a numpy.ndarray; pass torch\.from_numpy\(array\)$"
    for examples, place in ((array, ""), ((array,), r"\[0\]"), ((torch.zeros(1), [array]), r"\[1\]\[0\]")):
        with pytest.raises(InvalidInput, match=f"^example_inputs{place} is {remedy}"):
            tilewright.compile(module, examples)
    with pytest.raises(InvalidInput, match=rf"^example_keywords\['x'\] is {remedy}"):
        tilewright.compile(module, example_keywords={"x": array})
    with pytest.raises(InvalidInput, match=remedy):
        doubled(array)


def test_what_is_no_input_and_no_target() -> None:
    inputs: Any
    target: Any
    for inputs in (3, "x", {"x": torch.ones(1, 2)}):
        with pytest.raises(InvalidInput, match="example_inputs"):
            tilewright.compile(nn.Linear(2, 2), inputs)
    for target in (3, ["native"]):
        with pytest.raises(UnknownTarget, match="target is"):
            tilewright.compile(nn.Linear(2, 2), torch.ones(1, 2), target)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_dtypes_that_kernels_lack_run_through_pytorch(dtype: torch.dtype) -> None:
    module, x = nn.Linear(4, 3, dtype=dtype).requires_grad_(False), torch.randn(2, 4, dtype=dtype)
    with pytest.warns(UserWarning, match="1 operator runs through PyTorch"):
        executable = tilewright.compile(module, x)
    assert torch.equal(executable(x), module(x))


def test_the_warning_names_shape_and_place() -> None:
    with pytest.warns(UserWarning) as caught:
        tilewright.compile(Function(lambda a: torch.linalg.svd(a)[1]), torch.randn(3, 3))
    (warning,) = [w for w in caught if "PyTorch" in str(w.message)]
    assert "_linalg_svd" in str(warning.message) and "3x3, 3, 3x3" in str(warning.message) and Path(__file__).name in str(warning.message)


# Models


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a: a + 1 if a.sum() > 0 else a - 1, "data-dependent"),
        (lambda a: a * a.sum().item(), "Python number"),
        (lambda a: a[a > 0], "symbolic shape"),
        (lambda a: a @ a, "reduction dim"),
    ],
)
def test_a_model_that_cannot_be_compiled_is_one_line(function: Any, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidModel, match=words) as caught:
        tilewright.compile(Function(function), torch.randn(3, 4))
    assert "\n" not in str(caught.value) and caught.value.remedy
    assert capfd.readouterr() == ("", "")


def test_compiling_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module, x in ((network(), torch.randn(1, 3, 8, 8)), (nn.LSTM(3, 4).eval(), torch.randn(2, 1, 3))):
            tilewright.compile(module, x)
    assert capfd.readouterr() == ("", "")


def test_what_the_model_says_while_it_is_exported_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(a: Tensor) -> Tensor:
        print("a note", file=sys.stderr)
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        return a + 1

    with pytest.warns(UserWarning, match="mind the gap"):
        tilewright.compile(Function(loud), torch.ones(2))
    assert "a note" in capfd.readouterr().err


@pytest.mark.parametrize("target", ["native", "h200", "cortex-a53"])
def test_a_network_without_images(target: str) -> None:
    module, x = network(), torch.randn(0, 3, 8, 8)
    executable = tilewright.compile(module, x, target)
    if target == "native":
        for _ in range(2):
            agree(executable(x), module(x))


def test_training_mode_updates_its_buffers() -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)).train().requires_grad_(False)
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dropout runs through PyTorch
        executable = tilewright.compile(ours, torch.randn(6, 4))
    for _ in range(3):
        x = torch.randn(6, 4)
        agree(executable(x), theirs(x))
        agree(dict(ours.state_dict()), dict(theirs.state_dict()))


# Files


def test_every_flipped_member_of_an_artifact_is_refused(tmp_path: Path) -> None:
    tilewright.compile(network(), torch.randn(1, 3, 8, 8)).save(tmp_path / "a")
    members = [path for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    assert len(members) > 5
    for path in members:
        data = path.read_bytes()
        for position in (0, len(data) // 3, len(data) - 1):
            path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            with pytest.raises(InvalidArtifact) as caught:
                artifact.read(tmp_path / "a")
            assert "\n" not in str(caught.value)
        path.write_bytes(data)
    artifact.read(tmp_path / "a")


def test_damaged_exported_programs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(nn.Linear(16, 16), (torch.ones(1, 16),)), path)
    data = path.read_bytes()
    weight = nn.Linear(16, 16).weight  # most of the file's bytes
    assert weight.numel() * 4 < len(data)
    capfd.readouterr()
    middle = next(i for i in range(len(data)) if data.startswith(b"\x50\x4b\x03\x04", i) and b"weight" in data[i : i + 120])
    size = data.find(b"PK", middle + 4) - 32
    for damaged in (b"", b"hello", data[: len(data) // 2], data[:size] + bytes([data[size] ^ 1]) + data[size + 1 :]):
        path.write_bytes(damaged)
        assert main(["compile", str(path)]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1 and "m.pt2" in err and "torch.export.save" in err


def test_usage_that_is_refused_before_anything_is_compiled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "made_up.py").write_text("def broken():\n    raise RuntimeError('no network')\n")
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "m.pt2")
    capfd.readouterr()
    for arguments, words in (
        (["compile", "zoo:lenet5", "-o", str(tmp_path / "thesis")], "no artifact"),
        (["compile", "zoo:lenet5", "-o", ""], "names nothing"),
        (["compile", str(tmp_path / "m.pt2"), "--input", "2x2"], "--input"),
        (["compile", "torch.nn:Linear"], "raised TypeError"),
        (["bench", "some.zip"], "no PyTorch module"),
    ):
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err and "fault in tilewright" not in err, err
    for arguments in (
        ["bench", "zoo:lenet5", "--seconds", "-1"],
        ["verify", "zoo:lenet5", "--tolerance", "nan"],
        ["cache", "prune", "--limit", "-3"],
    ):
        assert main(arguments) == 2
        assert "no number from 0 up" in capfd.readouterr().err


# Failures of the environment


class Layers(nn.Module):
    """Padding by copy, a branch, and a node that runs through PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Any:
        y = self.first(x).relu()
        z = self.second(y)
        return self.pool(z + y), torch.linalg.svdvals(z.mean((0, 1))), y.softmax(1), y.argmax(1)  # singular vectors have arbitrary signs


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Layers(), (2, 3, 8, 8)),
        pytest.param(nn.LSTM(6, 5, 2, bidirectional=True), (4, 2, 6), marks=pytest.mark.slow),
        (nn.GRU(6, 5), (4, 1, 6)),
        (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (2, 5, 16)),
        (Function(lambda x: ((x.bfloat16() * 1.5).relu(), x.half() + 0.1)), (3, 7)),
    ],
    ids=["layers", "lstm", "gru", "attention", "16 bits"],
)
def test_each_kernel_may_fail_to_compile(module: nn.Module, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = module.eval().requires_grad_(False), torch.randn(shape)
    imported = pipeline.read(module, (x,))
    monkeypatch.setattr(pipeline, "read", lambda *_: imported)  # it is the same graph each time
    real = pipeline.compile_kernels
    count = 0

    def compile_with(broken: int | None) -> Any:
        def some(sources: Any, machine: Any, **options: Any) -> Any:
            nonlocal count
            results = real(sources, machine, **options)
            count = len(results)
            failure = KernelFailed("kernel does not compile", "see the log in some/folder")
            return [failure if broken in (index, -1) else result for index, result in enumerate(results)]

        monkeypatch.setattr(pipeline, "compile_kernels", some)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            executable = compile_module(module, x)
        return executable, [str(w.message) for w in caught if "does not compile" in str(w.message) or "do not compile" in str(w.message)]

    compile_with(None)
    for broken in (-1, *range(count)):
        executable, said = compile_with(broken)
        assert len(said) == 1 and "some/folder" in said[0]
        assert any("kernel failed" in reason for region in executable.image.program.regions for reason in region.reasons)
        for _ in range(2):
            agree(executable(x), module(x))
        assert executable.verify(x).passed
        if broken <= 0:
            executable.save(tmp_path / "a.zip")
            agree(tilewright.load(tmp_path / "a.zip")(x), module(x))


def test_a_compiler_that_fails_for_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    wrapper = tmp_path / "cc"
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && exec gcc "$@"\ngrep -q map_ kernel.c 2>/dev/null && exit 1\nexec gcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CC", str(wrapper))
    assert main(["verify", "zoo:lenet5"]) == 0
    out, err = capfd.readouterr()
    assert "1 kernel does not compile" in err and "without a word" in err
    folder = Path(err[err.index("log are in ") + 11 :].split()[0])
    assert (folder / "log").is_file() and (folder / "kernel.c").is_file()


def test_the_interpreter_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "int answer(void) { return %d; }\n"
    interpreter._library.cache_clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))  # no folder can be made inside a file
    assert interpreter._library(source % 41).answer() == 41
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "good"))
    assert interpreter._library(source % 42).answer() == 42
    (library,) = (tmp_path / "good" / "interpreter").iterdir()
    loaded = interpreter._library(source % 42)
    library.write_bytes(b"damaged")  # in place
    interpreter._library.cache_clear()
    assert loaded.answer() == 42
    assert interpreter._library(source % 42).answer() == 42


# Executables


def test_threads_share_an_executable_and_its_clones() -> None:
    module = network()
    executable = tilewright.compile(module, torch.randn(2, 3, 8, 8))
    clones = [executable.clone() for _ in range(2)]
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        exe = (executable, *clones)[number % 3]
        generator = torch.Generator().manual_seed(number)
        start.wait()
        for _ in range(20):
            x = torch.randn(2, 3, 8, 8, generator=generator)
            try:
                with torch.no_grad():
                    agree(exe(x), module(x))
            except BaseException as error:
                failures.append(error)
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not failures
    x = torch.randn(2, 3, 8, 8)
    first, second = executable(x), clones[0](x)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    executable.close()
    with pytest.raises(TilewrightError, match="closed"):
        executable(x)
    assert torch.equal(clones[0](x), second)
