"""Commands of `tilewright` run side by side by the workers of a Dask cluster, and models compiled for many targets that way.

A task is the arguments of a command, the contents of the files that it reads, and the name of the one that it writes: no object of ours travels, and
nothing of ours is unpickled. (Dask itself sends its messages with pickle: who can reach a scheduler can run code on it and on its workers.) A worker
runs the command in a process of its own, so that a model that exhausts the memory costs one task, and PyTorch is never in two threads at once.

A task whose worker is lost runs again on another, which is Dask's doing; one whose process was killed or could not start is tried `RETRIES` times
more; one that ended with an error is not, because it would again.
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
"""How long to wait for the scheduler's answer, and for its first worker."""
ENDED_CODES = (0, 1, 2)
"""Of a command that came to its end; any other says that its process was stopped."""
LIMIT_SECONDS = 3600.0
"""Of compiling one model, unless another limit is given."""
WORDS_BYTES = 1 << 24
"""Of what a command says that is kept."""
PREFIX = "tilewright: "
"""Of the lines that commands write to the standard error stream."""


class CommandStopped(Exception):
    """A command's process was stopped before its end: worth another trial."""


def run_command(arguments: Sequence[str], files: Mapping[str, bytes], output: str, version: str, limit: float = math.inf) -> dict[str, Any]:
    """What a worker does: runs `tilewright ARGUMENTS`. In the arguments "{folder}" stands for a folder of its own, in which the `files` are.
    Gives {"content": bytes of the file `output` or None, "error": text, "notes": lines, "seconds": of wall clock}. A command that has not ended after
    `limit` seconds is ended, with all that it has started, and has failed.

    Raises:
        CommandStopped: if its process was stopped from outside, as for want of memory.
    """
    if version != tilewright.__version__:
        error = f"a worker has tilewright {tilewright.__version__}, and {version} is asking; install the same release on every worker"
        return {"content": None, "error": error, "notes": [], "seconds": 0.0}
    start = time.perf_counter()
    with Scratch(_place()) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        command = [sys.executable, "-m", "tilewright", *(argument.replace("{folder}", str(folder)) for argument in arguments)]
        try:  # in the folder where this package is found
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
    """The folder of this Dask worker, which the next one removes if this is killed; None in any other process."""
    try:
        from distributed import get_worker

        return get_worker().local_directory
    except (ImportError, ValueError):
        return None


@contextmanager
def connected(scheduler: str | None, workers: int) -> Iterator[Client]:
    """A client of the scheduler at an address such as "tcp://host:8786"; without one, of so many worker processes on this machine, which end with it.

    Raises:
        UnsupportedOption: if Dask is not installed, no scheduler answers, or it has no worker.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise UnsupportedOption("the package distributed is not installed", "pip install 'tilewright[distributed]'") from error
    import dask

    # a model's weights are sent with its tasks on purpose
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
        if scheduler is None:
            # the memory is that of the commands' processes, which Dask does not see
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
    """The answers of `run_command` to (arguments, files, output), as they come, each with its task's number; what could not be run at all is an
    answer with an error too. The same file of several tasks is sent once. Tasks that were not waited for are cancelled."""
    from distributed import as_completed

    sent: dict[int, Any] = {}
    futures: dict[Any, int] = {}
    try:
        for number, (arguments, files, output) in enumerate(tasks):
            for data in files.values():
                if id(data) not in sent:
                    # a task that gives what it was given: Dask can make its result again when the worker that holds it is lost
                    sent[id(data)] = client.submit(bytes, data, pure=False)
            carried = {name: sent[id(data)] for name, data in files.items()}
            future = client.submit(run_command, list(arguments), carried, output, tilewright.__version__, limit, retries=RETRIES, pure=False)
            futures[future] = number
        for future in as_completed(list(futures)):
            number = futures.pop(future)
            try:
                answer = future.result()
            except Exception as error:  # after the last trial, or because its workers died again and again
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
    """A model, as the command line names it, to be compiled for a target; `arguments` are further ones of `tilewright compile`."""

    model: str
    target: str
    arguments: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """Of its artifact."""
        name = Path(self.model).stem if is_file(self.model) else self.model.rpartition(":")[2]
        return f"{name}-{self.target}.zip"


@dataclass(frozen=True)
class Compiled:
    """What became of a job: `path` of its artifact, or None and the error; `notes` are the warnings. Seconds of wall clock on the worker."""

    job: Job
    path: Path | None
    error: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def is_file(model: str) -> bool:
    return Path(model).suffix in (".onnx", ".pt2")


def content_of(model: str) -> bytes:
    """A model file in one piece: an ONNX file with the data files that belong to it.

    Raises:
        InvalidModel: if it cannot be read, or does not fit.
    """
    path = Path(model)
    if path.suffix == ".onnx":
        from tilewright.frontend.onnx_file import load

        try:
            content: bytes = load(path).SerializeToString()
            return content
        except ValueError as error:  # protocol buffers end at 2 GB
            raise InvalidModel(f"{model} with its data files is too large to be sent: {error}", "compile it with `tilewright compile`") from error
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidModel(f"{model} cannot be read: {error.strerror or error}", "check the path") from error


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raises UnsupportedOption where two jobs would write one artifact."""
    owners: dict[str, Job] = {}
    for job in jobs:
        other = owners.setdefault(job.file_name, job)
        if other.model != job.model:
            raise UnsupportedOption(f"{other.model} and {job.model} would both be written to {job.file_name}", "compile them into two folders")


def compile_all(
    client: Client, jobs: Sequence[Job], folder: Path, report: Callable[[Compiled], None], limit: float = LIMIT_SECONDS
) -> list[Compiled]:
    """Compiles the jobs, each for `limit` seconds at most, and writes each artifact as soon as it is there, under a temporary name first. `report` is
    told of each job when it is over. The failure of one job leaves the others alone. Gives what became of the jobs, in their order."""
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
    """Writes a file all at once."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
