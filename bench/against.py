"""Networks on this CPU or the GPU present as this checkout and another compile them, without trials: how much faster a change of the compiler makes
them.

    python -m bench.against CHECKOUT zoo:resnet50 zoo:mobilenet_v2 timm:efficientnet_b0 --threads 2 --name against_2
    python -m bench.against CHECKOUT zoo:resnet50 zoo:inception_v3 --target cuda --name against_h100

Each checkout has a process of its own, which compiles the network, compares its result with PyTorch's in float64, and then calls it in its turns.
Both read the measured facts of the CPU, if there are any, from the same cache folder. On a GPU each call finds level 2 full of other data, and is
timed by events.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import earlier_results, git_commit, write_results

HERE = Path(__file__).resolve().parents[1]
CALLS = """
import copy, statistics, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import tilewright
from tilewright.models import resolve
name, threads, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = "cuda" if target == "cuda" else "cpu"
answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
torch.set_num_threads(threads)
model = resolve(name, None, ())
module, inputs = model.module.to(device), tuple(x.to(device) for x in model.inputs(0))
executable = tilewright.compile(module, inputs, target, **({"threads": threads} if device == "cpu" else {}))
with torch.no_grad():
    expected = copy.deepcopy(module).double()(*(x.double() if x.is_floating_point() else x for x in inputs))
    found = executable(*inputs)
first = lambda results: next(iter(results.values())) if isinstance(results, dict) else results[0] if isinstance(results, tuple) else results
found, expected = first(found), first(expected)
print(float((found - expected).abs().max() / expected.abs().max()), len(executable.image.program.regions), file=answers, flush=True)
def on_cpu():
    start = time.perf_counter()
    executable(*inputs)
    return time.perf_counter() - start
def on_gpu():
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scratch.zero_()
    before.record()
    executable(*inputs)
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
if device == "cuda":
    scratch = torch.empty(64 << 20, device="cuda")
for line in sys.stdin:
    seconds, end = [], time.perf_counter() + float(line)
    while len(seconds) < 3 or time.perf_counter() < end:
        seconds.append(on_gpu() if device == "cuda" else on_cpu())
    print(statistics.median(seconds), file=answers, flush=True)
"""


class Server:
    """A process in which a checkout compiled the network, and calls it."""

    def __init__(self, checkout: Path, network: str, threads: int, target: str) -> None:
        path = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", CALLS, network, str(threads), target]
        self.process = subprocess.Popen(command, cwd=checkout, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        error, regions = self._line().split()
        self.error, self.regions = float(error), int(regions)

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a process ended with {self.process.wait()}; its error is above")
        return line

    def seconds(self, least: float) -> float:
        """Median seconds of the calls of one turn."""
        assert self.process.stdin is not None
        print(least, file=self.process.stdin, flush=True)
        return float(self._line())

    def end(self) -> None:
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="another checkout of this repository")
    parser.add_argument("networks", nargs="+", metavar="NETWORK", help="as on the command line of tilewright")
    parser.add_argument("--target", choices=("native", "cuda"), default="native")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.1, help="least time of one turn in one round")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest error relative to the largest output")
    parser.add_argument("--name", help="name of the result file, whose other networks stay")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for network in options.networks:
        checkouts = {"this": HERE, "against": options.checkout.resolve()}
        servers = {name: Server(checkout, network, options.threads, options.target) for name, checkout in checkouts.items()}
        if wrong := [name for name, server in servers.items() if not server.error <= options.tolerance]:
            raise SystemExit(f"{network}: {', '.join(wrong)}: error {max(servers[name].error for name in wrong):.1e}")
        seconds: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(options.rounds):
            for name, server in servers.items():
                seconds[name].append(server.seconds(options.seconds))
        for name, server in servers.items():
            server.end()
            lower, median, upper = statistics.quantiles(seconds[name], n=4)
            rows.append({"network": network, "checkout": name, "median_seconds": median, "quartile_seconds": [lower, upper],
                         "relative_error": server.error, "regions": server.regions})  # fmt: skip
    table = Table("network", "this, ms", "against, ms", "against / this", "regions")
    for this, against in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{1e3 * row['median_seconds']:.2f}" for row in (this, against)]
        ratio = against["median_seconds"] / this["median_seconds"]
        table.add_row(this["network"], *cells, f"{ratio:.2f}", f"{this['regions']}, {against['regions']}")
    Console().print(table)
    if options.name:
        earlier = earlier_results(options.name) or {"results": []}
        kept = [row for row in earlier["results"] if row["network"] not in options.networks]
        settings = {name: value for name, value in vars(options).items() if name != "checkout"} | {"against": git_commit(options.checkout / "bench")}
        print(f"wrote {write_results(options.name, settings, [*kept, *rows])}")


if __name__ == "__main__":
    main()
