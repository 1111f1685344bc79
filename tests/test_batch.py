"""Batch compilation on Dask: a local cluster of two workers, workers that are lost, and errors by model and target."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilewright
from tilewright.cli import main
from tilewright.errors import UnsupportedOption
from tilewright.tuning import batch
from tilewright.tuning.batch import CommandStopped, Compiled, Job, compile_all, connected, run_all, run_command
from tilewright.tuning.records import Records

distributed = pytest.importorskip("distributed")

MODULE_TEXT = """
import os, time
from pathlib import Path

import torch
from torch import nn

def perceptron(batch=1):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.randn(batch, 6),)

def sums():
    class Rising(nn.Module):
        def forward(self, x):
            return torch.cummax(x + x.sum(), 1)[0]
    return Rising(), torch.randn(2, 6)

def waits_the_first_time():
    marker = Path(__file__).with_name("started")
    if not marker.exists():
        marker.with_suffix(".partial").write_text(f"{os.getppid()} {os.getpid()}")
        marker.with_suffix(".partial").rename(marker)
        time.sleep(300)
    return perceptron()
"""
SECONDS = 120
STAND_IN_TEXT = f"""
import os, signal, sys, time
from pathlib import Path

if "stand_in:hangs" in sys.orig_argv:
    child = os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
    with Path(__file__).with_name("hanging").open("a") as file:
        file.write(f"{{os.getpid()}} {{child}} ")
    time.sleep(1000)
if "stand_in:memory_hog" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "stand_in:quick" in sys.orig_argv:
    Path(sys.orig_argv[sys.orig_argv.index("-o") + 1]).write_bytes(b"an artifact")
    print("tilewright: a note", file=sys.stderr)
    os._exit(0)

if "tune" in sys.orig_argv:
    if "2/2" in sys.orig_argv and Path(__file__).with_name("broken").exists():
        print("tilewright: error: made up", file=sys.stderr)
        os._exit(2)
    from tilewright.tuning import trials

    real, fake = trials.Trials, {str(Path(__file__).with_name("fake_workers.py"))!r}
    trials.Trials = lambda machine, devices, **_: real(machine, devices, 1, measurer=(fake, "measure", "{{}}"), compiler=(fake, "compile", "{{}}"))
"""
"""Code that runs when Python starts: stand-ins for `tilewright compile`, and for the compiling and measuring processes of workers' `tilewright
tune`."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module of models above, visible to workers that are started from now on."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "batch_models.py").write_text(MODULE_TEXT)
    (folder / "sitecustomize.py").write_text(STAND_IN_TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def client(modules: Path) -> Iterator[Any]:
    with connected(None, 2) as found:  # two workers, on any machine
        assert len(found.scheduler_info()["workers"]) == 2
        yield found


def onnx_model(path: Path, external: bool = False) -> np.ndarray:
    """Writes relu(x @ w) with x of 2x64, and returns w."""
    import onnx
    from onnx import helper

    w = np.random.default_rng(0).standard_normal((64, 40), dtype=np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", (2, 64)), ("z", (2, 40)))]
    graph = helper.make_graph(nodes, "small", ports[:1], ports[1:], [onnx.numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path, save_as_external_data=external, location="weights.bin" if external else None, size_threshold=0)
    return w


def test_models_and_targets(client: Any, modules: Path, tmp_path: Path) -> None:
    """Names and files, one for two targets: right results, the same artifacts as a single command, and failures confined to one model and target."""
    w = onnx_model(tmp_path / "product.onnx", external=True)
    assert (tmp_path / "weights.bin").is_file()
    exported = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh()).eval()
    torch.export.save(torch.export.export(exported, (torch.randn(2, 5),)), tmp_path / "exported.pt2")
    (tmp_path / "damaged.onnx").write_bytes((tmp_path / "product.onnx").read_bytes()[:20])
    models = [
        "stand_in:quick", str(tmp_path / "product.onnx"), str(tmp_path / "exported.pt2"), str(tmp_path / "damaged.onnx"), str(tmp_path / "missing.pt2"),
    ]  # fmt: skip
    pairs = [*((model, "native") for model in models), (models[0], "x86-avx2"), ("batch_models:perceptron", "x86-avx2")]
    jobs = [Job(model, target, ("--threads", "1")) for model, target in pairs]
    told: list[Compiled] = []
    out = tmp_path / "out"
    results = compile_all(client, jobs, out, told.append)
    assert [compiled.job for compiled in results] == jobs and sorted(map(id, told)) == sorted(map(id, results))
    assert {compiled.job.model for compiled in results if compiled.path} == {*models[:3], "batch_models:perceptron"}
    written = sorted(path.name for path in out.iterdir())
    assert written == ["exported-native.zip", "perceptron-x86-avx2.zip", "product-native.zip", "quick-native.zip", "quick-x86-avx2.zip"]
    errors = {compiled.job.model: compiled.error for compiled in results if compiled.error}
    assert set(errors) == set(models[3:])
    assert "damaged" in errors[models[3]] and "cannot be read" in errors[models[4]]

    x = torch.randn(2, 64)
    np.testing.assert_allclose(tilewright.load(out / "product-native.zip")(x), np.maximum(x.numpy() @ w, 0), rtol=1e-4, atol=1e-4)
    x = torch.randn(2, 5)
    torch.testing.assert_close(tilewright.load(out / "exported-native.zip")(x), exported(x), rtol=1e-4, atol=1e-5)
    assert main(["compile", "batch_models:perceptron", "--threads", "1", "--target", "x86-avx2", "-o", str(tmp_path / "one.zip")]) == 0
    assert contents(tmp_path / "one.zip") == contents(out / "perceptron-x86-avx2.zip")
    assert main(["explain", str(out / "perceptron-x86-avx2.zip")]) == 0


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_a_process_that_is_killed_costs_its_job_only(client: Any, modules: Path, tmp_path: Path) -> None:
    """As when memory runs out: the job is tried again, then reported as an error, and the worker survives."""
    before = set(client.scheduler_info()["workers"])
    jobs = [Job("stand_in:memory_hog", "native"), Job("batch_models:sums", "native")]
    hog, sums = compile_all(client, jobs, tmp_path, lambda compiled: None)
    assert hog.path is None and f"status -{int(signal.SIGKILL)}" in hog.error
    assert sums.path is not None and any("aten.cummax" in note for note in sums.notes)
    assert set(client.scheduler_info()["workers"]) == before


def test_what_cannot_be_written_is_an_error(client: Any, modules: Path, tmp_path: Path) -> None:
    (tmp_path / "quick-native.zip" / "in the way").mkdir(parents=True)
    (result,) = compile_all(client, [Job("stand_in:quick", "native")], tmp_path, lambda compiled: None)
    assert result.path is None and "cannot be written" in result.error
    assert [path.name for path in tmp_path.iterdir()] == ["quick-native.zip"]


def test_a_command_that_hangs_is_ended_with_what_it_started(client: Any, modules: Path, tmp_path: Path) -> None:
    """It is not tried again; the others continue."""
    jobs = [Job("stand_in:hangs", "native"), Job("stand_in:quick", "native")]
    hanging, quick = compile_all(client, jobs, tmp_path, lambda compiled: None, limit=3)
    assert hanging.path is None and hanging.error == "it did not end within 3 s" and hanging.seconds >= 3
    assert quick.path is not None and quick.path.read_bytes() == b"an artifact"
    processes = [int(number) for number in (modules / "hanging").read_text().split()]
    assert len(processes) == 2
    wait_for(lambda: not any(map(is_running, processes)))


def test_run_command(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tilewright.__version__
    answer = run_command(["compile", "stand_in:quick", "-o", "{folder}/x.zip"], {}, "x.zip", version)
    assert (answer["content"], answer["error"], answer["notes"]) == (b"an artifact", "", ["a note"])
    answer = run_command(["targets"], {}, "x.zip", version)
    assert answer["content"] is None and "wrote no x.zip" in answer["error"]
    assert "another" not in answer["error"] and "install the same release" in run_command(["targets"], {}, "x", "0.0.0")["error"]
    with pytest.raises(CommandStopped, match="status -9"):
        run_command(["compile", "stand_in:memory_hog"], {}, "x.zip", version)


@pytest.mark.slow
def test_tasks_are_tried_again(client: Any, modules: Path) -> None:
    """A command that is killed twice and then runs: RETRIES suffice. One file is sent to several tasks."""
    assert batch.RETRIES == 2
    counter = modules / "count"
    text = f"""
import os, signal, torch
def third_time():
    with open({str(counter)!r}, "a") as file:
        file.write("x")
    if os.path.getsize({str(counter)!r}) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.Linear(2, 2), torch.randn(1, 2)
"""
    (modules / "counted_models.py").write_text(text)
    data = b"something"
    tasks = [(["compile", "counted_models:third_time", "-o", "{folder}/a.zip"], {"data": data}, "a.zip"), (["targets"], {"copy": data}, "copy")]
    answers = dict(run_all(client, tasks))
    assert answers[0]["content"] is not None and counter.read_text() == "xxx"
    assert answers[1]["content"] == data


class Processes:
    """A scheduler and two workers, started as a user would, each a process that the test can end."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder
        self.started: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show", "--scheduler-file", str(file))
        wait_for(file.exists)
        wait_for(lambda: file.read_text().strip().endswith("}"))
        self.address = json.loads(file.read_text())["address"]
        self.workers = [self._start("worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard") for _ in range(2)]

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.logs / f"{arguments[0]}{len(self.started)}.log", "wb") as log:
            command = [sys.executable, "-m", "dask", *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.logs)
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self.started):
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_lost_worker(modules: Path, tmp_path: Path) -> None:
    """One of two workers is killed while it compiles: its model is compiled by the other, and its process ends with it."""
    (tmp_path / "logs").mkdir()
    processes = Processes(tmp_path / "logs")
    marker = modules / "started"
    try:
        command = [
            sys.executable, "-m", "tilewright", "batch", "batch_models:waits_the_first_time", "batch_models:perceptron", "--targets", "x86-avx2,neoverse-n1",
            "--scheduler", processes.address, "-o", str(tmp_path / "out"),
        ]  # fmt: skip
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.started.append(run)  # type: ignore[arg-type]
        wait_for(marker.exists)
        worker, child = map(int, marker.read_text().split())
        (lost,) = [process for process in processes.workers if process.pid == worker]
        lost.kill()
        lost.wait()
        said, _ = run.communicate(timeout=SECONDS)
        assert run.returncode == 0 and "4 of 4 artifacts" in said, said
        names = {f"{model}-{target}.zip" for model in ("waits_the_first_time", "perceptron") for target in ("x86-avx2", "neoverse-n1")}
        assert {path.name for path in (tmp_path / "out").iterdir()} == names
        wait_for(lambda: not is_running(child))
        (other,) = [process for process in processes.workers if process is not lost]
        assert other.poll() is None
    finally:
        processes.end()


@pytest.mark.slow
def test_tuning_on_workers(client: Any, modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The regions of a list are measured in parts, by whichever worker is free; the results are those that one machine would have recorded."""
    layers, store = tmp_path / "layers.json", tmp_path / "records.sqlite"
    sizes = ((16, 8, 6), (8, 8, 5), (16, 4, 7))
    entries = [{"name": f"layer {n}", "outputs": k, "channels": c, "height": y, "width": y, "filter": 3} for n, (k, c, y) in enumerate(sizes)]
    layers.write_text(json.dumps(entries[:2]))
    command = ["tune", str(layers), "--target", "h200", "--trials", "3"]
    distributed_command = [*command, "--records", str(store), "--scheduler", client.scheduler.address]
    (modules / "broken").touch()
    assert main(distributed_command) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "not measured: part 2 of 2: made up" in said and "2 regions in 2 parts: " in said
    (modules / "broken").unlink()
    assert main(distributed_command) == 0
    assert "not measured" not in capsys.readouterr().out

    alone = tmp_path / "alone.sqlite"
    child = [sys.executable, "-m", "tilewright", *command, "--records", str(alone)]
    subprocess.run(child, check=True, stdout=subprocess.DEVNULL)
    with Records(store) as first, Records(alone) as second:
        assert schedules_of(first) == schedules_of(second) and len({region for region, _ in schedules_of(first)}) == 2

    layers.write_text(json.dumps(entries))  # recorded candidates are not measured again: only the third layer's candidates are new
    assert main(distributed_command) == 0
    with Records(store) as first:
        assert len(schedules_of(first)) == 9
        before = list(first.all())
    assert main(distributed_command) == 0
    assert "0 new measurements" in " ".join(capsys.readouterr().out.split())
    with Records(store) as first:
        assert list(first.all()) == before


def schedules_of(records: Records) -> dict[tuple[str, str], float]:
    """Seconds by region and schedule, of the last measurement: of two in the same millisecond, the one with more replays."""
    return {(entry.region, entry.schedule): entry.seconds for entry in sorted(records.all(), key=lambda entry: (entry.date, entry.count))}


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


def test_command(client: Any, modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    options = ["--targets", "x86-avx2,x86-avx2", "-o", str(out), "--strict", "--limit", "600", "--scheduler", client.scheduler.address]
    assert main(["batch", "stand_in:quick", "batch_models:sums", *options]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 artifacts" in said and "not covered" in said and "quick-x86-avx2.zip" in said
    assert [path.name for path in out.iterdir()] == ["quick-x86-avx2.zip"]


def test_errors_before_anything_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start = ["batch", "zoo:lenet5"]
    rest = ["-o", str(tmp_path)]
    assert "did you mean h200" in error_line(capsys, *start, "--targets", "h20", *rest)
    assert "another machine on each worker" in error_line(capsys, *start, "--targets", "native", *rest, "--scheduler", "tcp://127.0.0.1:9")
    assert "both be written to lenet5-h200.zip" in error_line(capsys, *start, "timm:lenet5", "--targets", "h200", *rest)
    assert "leave it out" in error_line(capsys, *start, "--targets", "h200", *rest, "--scheduler", "tcp://127.0.0.1:9", "--workers", "2")
    assert "no whole number from 1 up" in error_line(capsys, *start, "--targets", "h200", *rest, "--workers", "0")
    assert "no whole number from 1 up" in error_line(capsys, *start, "--targets", "h200", *rest, "--limit", "0")
    (tmp_path / "lenet5-h200.zip").mkdir()
    assert "no artifact" in error_line(capsys, *start, "--targets", "h200", *rest)
    tune = ["tune", "zoo:lenet5", "--scheduler", "tcp://127.0.0.1:9"]
    assert "another GPU on each worker" in error_line(capsys, *tune)
    assert "is a CPU" in error_line(capsys, *tune, "--target", "neoverse-n1")
    assert "--part is for one machine" in error_line(capsys, *tune, "--target", "h200", "--part", "1/2")
    assert "use 1/4" in error_line(capsys, "tune", "zoo:lenet5", "--target", "h200", "--part", "3/2")
    monkeypatch.setattr(batch, "CONNECT_SECONDS", 0.5)
    assert "no scheduler answers" in error_line(capsys, *start, "--targets", "a100", *rest, "--scheduler", "tcp://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "tilewright[distributed]" in error_line(capsys, *start, "--targets", "a100", *rest)


def test_a_scheduler_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WORKER_SECONDS", 0.2)
    with distributed.LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster:
        with pytest.raises(UnsupportedOption, match="has no worker"), connected(cluster.scheduler_address, 1):
            pass
