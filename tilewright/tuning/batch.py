"""Runs commands of `tilewright` in parallel on the workers of a Dask cluster, and so compiles models for many targets.

A task consists of the arguments of a command, the contents of its input files, and the name of its output file: no objects of this package are sent
or unpickled. (Dask itself sends its messages with pickle: whoever can reach a scheduler can run code on it and on its workers.) A worker runs the
command in a separate process, so that a model that exhausts the memory costs one task, and PyTorch never runs in two threads at once.

Dask runs a task again on another worker if its worker is lost. A task whose process was killed or could not start is retried `RETRIES` times; a task
that ended with an error is not, because it would fail again.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tilewright
from tilewright import settings
from tilewright.errors import InvalidModel, TilewrightError, UnsupportedOption
from tilewright.system.programs import ProgramHung, run_program
from tilewright.system.scratch import Scratch

if TYPE_CHECKING:
    from distributed import Client

RETRIES = 2
CONNECT_SECONDS, WORKER_SECONDS = 10, 60
"""Timeouts for the scheduler's answer, and for its first worker."""
ENDED_CODES = (0, 1, 2)
"""Exit codes of a completed command; any other means that its process was stopped."""
LIMIT_SECONDS = 3600.0
"""Default time limit for compiling one model."""
WORDS_BYTES = 1 << 24
"""Maximum bytes of a command's output that are kept."""
PREFIX = "tilewright: "
"""Prefix of the lines that commands write to standard error."""


class CommandStopped(Exception):
    """A command's process was stopped before it completed; the task may be retried."""


def run_command(arguments: Sequence[str], files: Mapping[str, bytes], output: str, version: str, limit: float = math.inf) -> dict[str, Any]:
    """The work of a worker: runs `tilewright ARGUMENTS`. In the arguments "{folder}" stands for a temporary folder that contains the `files`. Returns
    {"content": bytes of the file `output` or None, "error": text, "notes": lines, "seconds": wall-clock seconds}. A command that takes longer than
    `limit` seconds is killed, with everything it started, and has failed.

    Raises:
        CommandStopped: if its process was stopped from outside, for example because memory ran out.
    """
    if version != tilewright.__version__:
        error = f"a worker has tilewright {tilewright.__version__}, and {version} is asking; install the same release on every worker"
        return {"content": None, "error": error, "notes": [], "seconds": 0.0}
    start = time.perf_counter()
    with Scratch(_place()) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        command = [sys.executable, "-m", "tilewright", *(argument.replace("{folder}", str(folder)) for argument in arguments)]
        try:  # in the folder that contains this package
            ended = run_program(command, limit, Path(__file__).parents[2], WORDS_BYTES, settings.child_environment())
        except ProgramHung:
            return {"content": None, "error": f"it did not end within {limit:g} s", "notes": [], "seconds": time.perf_counter() - start}
        lines = ended.errors.strip().splitlines()
        if ended.status not in ENDED_CODES:
            raise CommandStopped(f"its process was stopped (status {ended.status}){': ' + lines[-1] if lines else ''}")
        said = [line.removeprefix(PREFIX).replace(f"{folder}{os.sep}", "") for line in lines]
        file = folder / output
        if ended.status == 0 and file.is_file():
            return {"content": file.read_bytes(), "error": "", "notes": said, "seconds": time.perf_counter() - start}
        error = said.pop().removeprefix("error: ") if said else f"the command wrote no {output}"
        return {"content": None, "error": error, "notes": said, "seconds": time.perf_counter() - start}


def _place() -> str | None:
    """The folder of this Dask worker, which the next worker removes if this one is killed; None in any other process."""
    try:
        from distributed import get_worker

        return get_worker().local_directory
    except (ImportError, ValueError):
        return None


@contextmanager
def connected(scheduler: str | None, workers: int) -> Iterator[Client]:
    """A client of the scheduler at an address such as "tcp://host:8786"; without one, a client of `workers` local processes, which end with it.

    Raises:
        UnsupportedOption: if Dask is not installed, no scheduler answers, or it has no worker.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise UnsupportedOption("the package distributed is not installed", "pip install 'tilewright[distributed]'") from error
    import dask

    # a model's weights are deliberately sent with its tasks
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
        if scheduler is None:
            # the commands' processes use the memory, which Dask does not see
            place = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
            with LocalCluster(n_workers=workers, threads_per_worker=1, memory_limit=0, silence_logs=50, **place) as local, Client(local) as client:
                yield client
            return
        try:
            client = Client(scheduler, timeout=CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            raise UnsupportedOption(f"no scheduler answers at {scheduler}", "start one with `dask scheduler`, and give its address") from error
        with client:
            try:
                client.wait_for_workers(1, timeout=WORKER_SECONDS)
            except TimeoutError as error:
                raise UnsupportedOption(f"the scheduler at {scheduler} has no worker", f"start some with `dask worker {scheduler}`") from error
            yield client


def run_all(
    client: Client, tasks: Sequence[tuple[Sequence[str], Mapping[str, bytes], str]], limit: float = math.inf
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The answers of `run_command` to (arguments, files, output), each with its task's number, in order of completion. A task that could not be run
    yields an answer with an error. A file shared by several tasks is sent once. Tasks that are no longer awaited are cancelled."""
    from distributed import as_completed

    sent: dict[int, Any] = {}
    futures: dict[Any, int] = {}
    try:
        for number, (arguments, files, output) in enumerate(tasks):
            for data in files.values():
                if id(data) not in sent:
                    # an identity task: Dask can recompute its result if the worker that holds it is lost
                    sent[id(data)] = client.submit(bytes, data, pure=False)
            carried = {name: sent[id(data)] for name, data in files.items()}
            future = client.submit(run_command, list(arguments), carried, output, tilewright.__version__, limit, retries=RETRIES, pure=False)
            futures[future] = number
        for future in as_completed(list(futures)):
            number = futures.pop(future)
            try:
                answer = future.result()
            except Exception as error:  # after the last retry, or because its workers died repeatedly
                answer = {"content": None, "error": _words(error), "notes": [], "seconds": 0.0}
            future.release()
            yield number, answer
    finally:
        client.cancel([*futures, *sent.values()])


def _words(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return first if isinstance(error, CommandStopped) else f"{type(error).__name__}: {first}"


# Compiling


@dataclass(frozen=True)
class Job:
    """A model, as named on the command line, to be compiled for a target; `arguments` are further arguments of `tilewright compile`."""

    model: str
    target: str
    arguments: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """File name of its artifact."""
        name = Path(self.model).stem if is_file(self.model) else self.model.rpartition(":")[2]
        return f"{name}-{self.target}.zip"


@dataclass(frozen=True)
class Compiled:
    """The result of a job: `path` of its artifact, or None and the error; `notes` are warnings, `seconds` wall-clock seconds on the worker."""

    job: Job
    path: Path | None
    error: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def is_file(model: str) -> bool:
    return Path(model).suffix in (".onnx", ".pt2")


def content_of(model: str) -> bytes:
    """The content of a model file, including an ONNX file's external data.

    Raises:
        InvalidModel: if it cannot be read, or does not fit.
    """
    path = Path(model)
    if path.suffix == ".onnx":
        from tilewright.frontend.onnx_file import load

        try:
            content: bytes = load(path).SerializeToString()
            return content
        except ValueError as error:  # protocol buffers are limited to 2 GB
            raise InvalidModel(f"{model} with its data files is too large to be sent: {error}", "compile it with `tilewright compile`") from error
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidModel(f"{model} cannot be read: {error.strerror or error}", "check the path") from error


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raises UnsupportedOption if two jobs would write the same artifact."""
    owners: dict[str, Job] = {}
    for job in jobs:
        other = owners.setdefault(job.file_name, job)
        if other.model != job.model:
            raise UnsupportedOption(f"{other.model} and {job.model} would both be written to {job.file_name}", "compile them into two folders")


def compile_all(
    client: Client, jobs: Sequence[Job], folder: Path, report: Callable[[Compiled], None], limit: float = LIMIT_SECONDS
) -> list[Compiled]:
    """Compiles the jobs, each for at most `limit` seconds, and writes each artifact as soon as it is available, atomically. `report` is called with
    each completed job. A failed job does not affect the others. Returns the results in the order of the jobs."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[int, Compiled] = {}

    def over(number: int, compiled: Compiled) -> None:
        results[number] = compiled
        report(compiled)

    contents: dict[str, bytes | TilewrightError] = {}
    tasks, numbers = [], []
    for number, job in enumerate(jobs):
        files, model = {}, job.model
        if is_file(job.model):
            if job.model not in contents:
                try:
                    contents[job.model] = content_of(job.model)
                except TilewrightError as error:
                    contents[job.model] = error
            content = contents[job.model]
            if isinstance(content, TilewrightError):
                over(number, Compiled(job, None, str(content)))
                continue
            name = Path(job.model).name
            files, model = {name: content}, f"{{folder}}{os.sep}{name}"
        arguments = ["compile", model, "--target", job.target, *job.arguments, "-o", f"{{folder}}{os.sep}artifact.zip"]
        tasks.append((arguments, files, "artifact.zip"))
        numbers.append(number)
    for task, answer in run_all(client, tasks, limit):
        job = jobs[numbers[task]]
        path, wrong = None, answer["error"]
        if answer["content"] is not None:
            path = folder / job.file_name
            try:
                _replace(path, answer["content"])
            except OSError as error:
                path, wrong = None, f"{path} cannot be written: {error.strerror or error}"
        over(numbers[task], Compiled(job, path, wrong, tuple(answer["notes"]), answer["seconds"]))
    return [results[number] for number in range(len(jobs))]


def _replace(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
