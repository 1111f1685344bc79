"""Draws the README's chart of speed-ups from result files.

    python -m bench.chart            # writes docs/speed_ups.svg
    python -m bench.chart --check    # exit status 1 if the picture was not drawn from today's result files

The picture names the digest of the figures that it shows, so that checking needs no drawing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.common import RESULTS

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "speed_ups.svg"
CPU, GPU = "cpu_networks_peers", "gpu_networks_h200"
PEERS = {"PyTorch": ("eager", "eager_cl", "inductor"), "onnxruntime": ("onnxruntime",), "OpenVINO": ("openvino",)}
COLOURS = {"PyTorch": "#d1495b", "onnxruntime": "#2e6f95", "OpenVINO": "#3c9d6d"}


def speed_ups(file: str) -> dict[str, dict[str, float]]:
    """Of each network, by peer: the fastest measured time of the peer's forms over ours."""
    times: dict[str, dict[str, float]] = {}
    for entry in json.loads((RESULTS / f"{file}.json").read_text())["results"]:
        if entry["status"] == "measured":
            times.setdefault(entry["network"], {})[entry["contender"]] = entry["median_seconds"]
    found: dict[str, dict[str, float]] = {}
    for network, measured in times.items():
        ratios = {
            peer: min(measured[form] for form in forms if form in measured) / measured["tilewright"]
            for peer, forms in PEERS.items()
            if "tilewright" in measured and any(form in measured for form in forms)
        }
        if ratios:
            found[network] = ratios
    return found


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """What the chart shows: on the CPU all networks with peers, on the GPU the same networks."""
    cpu, gpu = speed_ups(CPU), speed_ups(GPU)
    return {"cpu": cpu, "gpu": {network: gpu[network] for network in cpu if network in gpu}}


def digest(shown: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def draw(shown: dict[str, dict[str, dict[str, float]]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    matplotlib.rcParams.update({"svg.hashsalt": "tilewright", "font.family": "sans-serif", "font.size": 10, "svg.fonttype": "path"})
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained", width_ratios=(3, 2))
    networks = sorted(shown["cpu"], key=lambda network: min(shown["cpu"][network].values()))
    titles = ("CPU, two threads: time of the peer / ours", "H200: time of PyTorch eager / ours")
    for axis, part, title in zip(axes, ("cpu", "gpu"), titles, strict=True):
        for row, network in enumerate(networks):
            ratios = shown[part].get(network, {})
            if len(ratios) > 1:
                axis.plot([min(ratios.values()), max(ratios.values())], [row, row], color="#bbbbbb", linewidth=1.5, zorder=1)
            for peer, ratio in ratios.items():
                axis.scatter(ratio, row, color=COLOURS[peer], s=36, zorder=2, label=peer)
        axis.axvline(1, color="#444444", linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8, 16]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(axis="x", color="#e4e4e4")
        axis.set_axisbelow(True)
        axis.set_title(title, fontsize=10.5, loc="left")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(networks)), networks)
    handles, names = axes[0].get_legend_handles_labels()
    kept = dict(zip(names, handles, strict=True))
    axes[0].legend(kept.values(), kept.keys(), loc="lower right", frameon=True, edgecolor="none", fontsize=9)
    figure.savefig(PICTURE, metadata={"Date": None, "Description": f"figures {digest(shown)}"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    shown = figures()
    if not parser.parse_args().check:
        draw(shown)
        return 0
    if f"figures {digest(shown)}" in PICTURE.read_text():
        return 0
    print(f"{PICTURE.name} was drawn from other result files: run `python -m bench.chart`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
