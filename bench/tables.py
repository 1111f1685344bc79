"""Generates tables of the documentation from the result files that they cite.

    python -m bench.tables            # rewrites every generated table
    python -m bench.tables --check    # lists tables that differ from their files; exit status 1 if there are any

A generated table is between the lines `<!-- table NAME -->` and `<!-- end -->` of a page. `TABLES` maps each name to a function that returns rows of
cells, the header first. Figures are rounded only here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.common import RESULTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
BLOCK = re.compile(r"<!-- table (?P<name>[a-z0-9_]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
Rows = list[list[str]]


def results_of(name: str, part: str = "results") -> Any:
    """The results in bench/results/NAME.json, or its settings, among which some benchmarks store a summary."""
    return json.loads((RESULTS / f"{name}.json").read_text())[part]


def percent(share: float | None, digits: int = 1) -> str:
    """A question mark for what was not measured."""
    return "?" if share is None else f"{100 * share:.{digits}f}"


def power(value: float) -> str:
    """A value as text such as 1.6e-6."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def spaces() -> Rows:
    """Candidates of each schema over CNNOpt's twenty layers."""
    says = {
        "contraction": ("implicit GEMM", "tiles of block and thread, split of the sum, stages of asynchronous copies, cluster"),
        "gemv": ("few rows", "columns of a block, threads per sum, split"),
        "direct": (
            "RS and S kernels of CNNOpt",
            "register, warp and block tiles along K, Y, X; channels per step, split, stages, source of the filters",
        ),
        "winograd": ("three kernels", "F(2x2) or F(4x4), the tiles of the product, threads of the transforms"),
        "winograd fused": ("one kernel", "F(2x2) or F(4x4), tiles and outputs of a block, channels per step, split over a cluster"),
    }
    layers = [entry["schemas"] for entry in results_of("configurations_h200")]
    rows = [["schema", f"candidates generated, {len(layers)} layers", "feasible", "what a schedule says"]]
    for name, (what, parameters) in says.items():
        counts = (sum(layer[name][kind] for layer in layers if name in layer) for kind in ("generated", "feasible"))
        rows.append([f"`{name}`, {what}", *(f"{count:,}" for count in counts), parameters])
    return rows


def bounds() -> Rows:
    """Measured kernels against the lower bounds and against DeepCuts' limit."""
    own, published = results_of("bounds_h200"), results_of("bounds_v100")

    def row(what: str, kernels: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
        return [what, *(f"{sum(entry[key] for entry in entries):,}" for key in (kernels, "faster than our bound", "above DeepCuts' limit"))]

    training = [entry for entry in published if "train" in entry["file"]]
    layers = [entry for entry in published if "train" not in entry["file"]]
    return [
        ["measured kernels", "number", "faster than our bound", "above DeepCuts' limit"],
        row(f"{len(own)} layers, H200, all schemas (`bounds_h200.json`)", "measured", own),
        row("layers of CNNOpt's published data, V100 (`bounds_v100.json`)", "kernels", layers),
        row("its `train.csv` files", "kernels", training),
    ]


def pruning() -> Rows:
    """Candidates left by the bounds if the time of each layer's best kernel is known."""
    own = results_of("bounds_h200")
    feasible, left = (sum(entry[key] for entry in own) for key in ("feasible", "left by pruning"))
    tightest = max(entry["tightness of the best"] for entry in own)
    return [
        ["feasible candidates", "left by pruning with the best time", "bound over time of a layer's best kernel, at most"],
        [f"{feasible:,}", f"{left:,}", f"{percent(tightest, 0)} %"],
    ]


def outliers() -> Rows:
    """Errors of Winograd's algorithm around outliers."""
    found = results_of("winograd_numerics")
    sizes = list(found[0]["beside an outlier of"])
    rows = [["", "no outlier", *(f"outlier {power(float(size)).replace('.0', '')}" for size in sizes), "pixels spoilt by an infinity"]]
    for entry in found:
        errors = (power(entry["beside an outlier of"][size]) for size in sizes)
        name = "PyTorch (oneDNN)" if entry["way"] == "PyTorch" else entry["way"]
        rows.append([name, power(entry["usual"]), *errors, str(entry["pixels spoilt by an infinity"])])
    return rows


def predicted_transactions() -> Rows:
    """Correlation of counted work with measured time, CNNOpt's tables 6 and 7."""
    (found,) = (entry for entry in results_of("transactions_predicted_h200") if "fastest" in entry)
    ways = {"fastest": "fastest kernel of each layer", "all": "all kernels", "mean by layer": "mean within a layer"}
    return [
        ["correlation with time", *ways.values()],
        *([name.removeprefix("predicted "), *(f"{found[way][name]:.2f}" for way in ways)] for name in found["fastest"]),
    ]


def counted_transactions() -> Rows:
    """Predicted counts of GPU kernels against those of the hardware."""
    says = {
        "shared loads": "wavefronts, loads", "shared stores": "wavefronts, stores", "shared": "wavefronts, all",
        "global loads": "sectors, loads and copies", "global stores": "sectors, stores", "instructions": "instructions of warps",
        "memory reads": "sectors that come from memory", "level 2 reads": "sectors that level 2 gives",
    }  # fmt: skip
    rows = [["", "kernels", "median predicted / counted", "least", "greatest", "within 1 %", "within 5 %", "correlation"]]
    found = results_of("gpu_analysis", "settings")["agreement"]
    for name, words in says.items():
        entry = found[name]
        ratios = (f"{entry[key]:.{digits}f}" for key, digits in (("median ratio", 4), ("least", 3), ("greatest", 3)))
        shares = (f"{100 * entry[key]:.0f} %" for key in ("within 1 %", "within 5 %"))
        rows.append([words, str(entry["kernels"]), *ratios, *shares, f"{entry['correlation']:.4f}"])
    return rows


def top_ratios() -> Rows:
    """Tuna's top-k ratios over the twenty layers."""
    rows = [["schedules", "ranked by", "layers", "top-10 ratio", "top-50 ratio", "unmeasured candidates passed over for ten", "for fifty"]]
    for entry in results_of("top_ratio_h200"):
        if entry["layer"] == "all":
            ranked = "models and learned part" if entry["learned"] else "models"
            ratios = (f"{entry[f'ratio of {count}']:.3f}" for count in (10, 50))
            skipped = (f"{entry[f'passed over for {count}']:.1f}" for count in (10, 50))
            rows.append([entry["kind"], ranked, str(entry["layers"]), *ratios, *skipped])
    return rows


def refitted() -> Rows:
    """The analytical order of layers left out, with present constants and with constants fitted to other layers."""
    rows = [["schemas ranked", "constants", "LoP@1 %", "LoP@10 %", "rank correlation", "mean error of logarithms"]]
    entries = [entry for entry in results_of("refit_h200") if "constants" in entry]
    for schema in dict.fromkeys(entry["schema"] for entry in entries):
        for entry in entries:
            if entry["schema"] == schema:
                losses = (percent(entry[name]) for name in ("lop@1", "lop@10"))
                rows.append([schema, entry["constants"], *losses, f"{entry['spearman']:.2f}", f"{entry['error']:.3f}"])
    return rows


def compared_models() -> Rows:
    """Training methods on random layers of an H200."""
    says = {
        "analytical": "analytical",
        "black box": "random forest, own black box, time",
        "hybrid forest": "random forest, candidate, time (the paper's hybrid)",
        "ours": "**gradient boosting, correction, fast weigh more** (`RECIPE`)",
    }
    rows = [["model", "LoP@1 %", "LoP@10 %", "LoP@30 %", "rank correlation"]]
    for entry in results_of("model_comparison_h200"):
        losses = (percent(entry[f"lop@{count}"]) for count in (1, 10, 30))
        described = f"{entry.get('learner', '').replace('_', ' ')}, {entry.get('record')}, {entry.get('target')}"
        weights = f", weight of fast kernels {entry.get('favour', 0):g}, centred {entry.get('centred', 1):g}"
        rows.append([says.get(entry["model"], described + weights), *losses, f"{entry['spearman']:.2f}"])
    return rows


def published_training() -> Rows:
    """Training methods on the training files of CNNOpt's published data."""
    found = results_of("published_v100_training")
    kinds = [kind for kind in found[0] if kind != "model"]
    counts = {kind: [key.removeprefix("lop") for key in found[0][kind] if key.startswith("lop")] for kind in kinds}
    heads = (f"{kind} ({found[0][kind]['problems']}): LoP{' / '.join(counts[kind])} %" for kind in kinds)
    rows = [["model", *heads, "trials to 99 %"]]
    for entry in found:
        losses = (" / ".join(percent(entry[kind][f"lop{count}"]) for count in counts[kind]) for kind in kinds)
        rows.append([entry["model"], *losses, f"{entry['all']['trials_99']:.1f}"])
    return rows


def published() -> Rows:
    """The order of whole spaces on the layers of CNNOpt's published data."""
    says = {
        "analytical as printed": "analytical, as the paper prints it",
        "analytical": "analytical, `counted_cost`",
        "black box": "random forest, black box, time (the paper's black box)",
        "hybrid": "gradient boosting, hybrid, rank",
        "detailed": "**gradient boosting, detailed, rank**",
    }
    found = {entry["model"]: entry for entry in results_of("published_v100") if entry["layer"] == "all"}
    rows = [["model", "LoP@1 %", "LoP@10 %", "LoP@30 %", "trials to 95 / 99 / 100 %"]]
    for model, name in says.items():
        losses = (percent(found[model][f"lop@{count}"], digits) for count, digits in ((1, 1), (10, 2), (30, 2)))
        rows.append([name, *losses, " / ".join(f"{found[model][f'trials_{share}']:.1f}" for share in (95, 99, 100))])
    return rows


def choices() -> Rows:
    """The order of whole spaces on CNNOpt's twenty layers."""
    says = {
        ("space", "analytical"): "analytical",
        ("space", "black box"): "random forest, own black box (the paper's black box)",
        ("space", "hybrid forest"): "random forest, candidate, time (the paper's hybrid)",
        ("space", "shipped"): "**the model in the package**",
        ("measured", "online-learned search"): "online-learned search over the measured candidates alone",
        ("measured", "random order"): "random order of the measured candidates",
    }
    (live,) = (entry for entry in results_of("search_live_h200") if entry.get("layer") == "all")
    found = {(entry["over"], entry["way"]): entry for entry in results_of("choice_quality_h200") if entry["layer"] == "all"}
    rows = [["order", "LoP@1 %", "LoP@10 %", "LoP@30 %", "trials to 95 %: mean, median", "to 99 %: mean, median"]]
    for way, name in says.items():
        losses = (percent(found[way][f"lop@{count}"]) for count in (1, 10, 30))
        trials = (f"{found[way][f'trials_{share}']:.3g}, {found[way][f'median trials_{share}']:.3g}" for share in (95, 99))
        rows.append([name, *losses, *trials])
    losses = (percent(live[f"lop@{count}"]) for count in (1, 10, 30))
    # a search that ends before it has found such a candidate counts with its number of trials
    trials = (f"above {live[f'trials_{share}']:.0f}" for share in (95, 99))
    rows.append(["online-learned search over the whole space, measuring (`search_live_h200.json`)", *losses, *trials])
    return rows


def searches() -> Rows:
    """How far the best of some evaluations is from the best of the space, in the mean."""
    says = {"ours": "`evolve`", "pycma": "pycma", "printed": "algorithm 4 as printed", "random": "random"}
    columns = [("h200", "H200", count) for count in (50, 100, 200, 400)] + [("cortex-a53", "Cortex-A53", count) for count in (20, 40, 80)]
    found = {(entry["target"], entry["search"], entry["evaluations"]): entry for entry in results_of("evolution") if "mean_loss" in entry}
    rows = [["evaluations", *(f"{name}: {count}" for _, name, count in columns)]]
    for search, name in says.items():
        rows.append([name, *(f"{percent(found[target, search, count]['mean_loss'])} %" for target, _, count in columns)])
    return rows


def code_scores() -> Rows:
    """Scores of compiled code beside the models that see none."""
    says = {"linear": "linear combination", "terms": "named terms", "models": "models"}
    layers = results_of("cpu_score")
    rows = [[f"mean of {len(layers)} layers", "rank correlation", "top-10 ratio", "loss", "loss among eight"]]
    for way, name in says.items():
        correlation, ratio, loss, eight = (
            statistics.mean(layer[way][key] for layer in layers) for key in ("rank correlation", "top-10 ratio", "loss", "loss among 8")
        )
        rows.append([name, f"{correlation:.2f}", f"{ratio:.3f}", f"{percent(loss)} %", f"{percent(eight)} %"])
    return rows


def learned_on_cpus() -> Rows:
    """What the forest makes of the order of the models, with and without data of the machine."""
    says = {
        "conv2d": "convolutions, all schedules", "winograd conv2d": "Winograd alone", "direct conv2d": "direct alone",
        "depthwise": "depthwise", "batched product": "batched products",
    }  # fmt: skip
    means = [entry for entry in results_of("cpu_learned") if entry["layer"] == "all"]
    rows = [["machine", "means of", "ranked by", "loss of the first", "median", "loss of ten", "top-10 ratio", "top-50 ratio"]]
    for machine in dict.fromkeys(entry["machine"] for entry in means):
        for kind, name in says.items():
            for entry in means:
                if (entry["machine"], entry["kind"]) != (machine, kind):
                    continue
                losses = (f"{percent(entry[key])} %" if key in entry else "" for key in ("loss", "median loss", "loss of ten"))
                ratios = (f"{entry[key]:.3f}" if (key := f"ratio of {count}") in entry else "" for count in (10, 50))
                rows.append([machine, f"{name} ({entry['layers']})", entry["ranked by"], *losses, *ratios])
    return rows


def calibrated_choices() -> Rows:
    """Losses of first choices on CPUs by the facts that the models use."""
    facts = ("assumed", "measured", "only level 3 measured", "all but level 3 measured")
    names = {"conv2d": "convolutions", "depthwise": "depthwise", "batched product": "batched products"}
    losses = {(row["kind"], row["ranked by"], row["facts"]): row for row in results_of("calibrated_choices")}
    rows = [["mean loss of the first", "ranked by", *facts]]
    for kind, name in names.items():
        for ranked in ("models", "models and learned part"):
            own = [losses[kind, ranked, fact] for fact in facts]
            rows.append([f"{name} ({own[0]['layers']})" if ranked == "models" else "", ranked, *(f"{percent(row['loss'])} %" for row in own)])
    return rows


def adapted() -> Rows:
    """Orders adapted to a minute's kernels, on random layers, on the twenty, and in cross-validation within the minute."""
    columns = [(found, name) for found in ("random", "twenty") for name in ("lop@1", "lop@10", "spearman")] + [("within the minute", "lop@1")]
    headings = ("LoP@1 %", "LoP@10 %", "rank correlation")
    rows = [["kernels", "order", "random layers: " + headings[0], *headings[1:], "the twenty: " + headings[0], *headings[1:], "within: LoP@1 %"]]
    for entry in results_of("adapted_h200"):
        values = [(name, entry[found][name]) if entry.get(found) else None for found, name in columns]
        cells = ["" if value is None else f"{value[1]:.2f}" if value[0] == "spearman" else percent(value[1]) for value in values]
        rows.append([f"{entry['kernels']:,}", entry["order"], *cells])
    return rows


def milliseconds(seconds: float) -> str:
    """With three digits at least."""
    value = 1e3 * seconds
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def medians(name: str) -> dict[str, dict[str, float]]:
    """Median seconds of each network by contender."""
    found: dict[str, dict[str, float]] = {}
    for entry in results_of(name):
        if entry["median_seconds"] is not None:
            found.setdefault(entry["network"], {})[entry["contender"]] = entry["median_seconds"]
    return found


def networks() -> Rows:
    """Milliseconds of networks, ours and others', where a file of a CPU has them."""

    def cells(times: Mapping[str, float], *groups: Sequence[str]) -> list[str]:
        least = (min((times[name] for name in group if name in times), default=None) for group in groups)
        return ["–" if seconds is None else milliseconds(seconds) for seconds in least]

    gpu, two, sixteen = (medians(name) for name in ("gpu_networks_h200", "cpu_networks_peers", "cpu_networks_16_threads"))
    eager, others = ("eager", "eager_cl"), (("eager", "eager_cl", "inductor"), ("onnxruntime",), ("openvino",))
    threads = (f"{name}, {count} threads" for count in (2, 16) for name in ("ours", "PyTorch", "onnxruntime", "OpenVINO"))
    rows = [["ms", "ours, H200", "eager, H200", *threads]]
    for name in dict.fromkeys((*two, *sixteen)):
        on_cpu = (cells(times.get(name, {}), ("tilewright",), *others) for times in (two, sixteen))
        rows.append([name, *cells(gpu.get(name, {}), ("tilewright",), eager), *itertools.chain(*on_cpu)])
    return rows


def speed_ups() -> Rows:
    """The time of the best other contender over ours on CPUs."""
    both = medians("cpu_networks_peers").keys() & medians("cpu_networks_16_threads").keys()
    rows = [["CPU", "networks", "best peer / ours: geometric mean", "least"]]
    for what, name, kept in (
        ("2 threads", "cpu_networks_peers", None), ("2 threads, networks of both", "cpu_networks_peers", both),
        ("16 threads, networks of both", "cpu_networks_16_threads", both), ("16 threads", "cpu_networks_16_threads", None),
    ):  # fmt: skip
        times = {network: own for network, own in medians(name).items() if kept is None or network in kept}
        ratios = {network: min(own[peer] for peer in own if peer != "tilewright") / own["tilewright"] for network, own in times.items()}
        least = min(ratios, key=lambda network: ratios[network])
        rows.append([what, str(len(ratios)), f"{statistics.geometric_mean(ratios.values()):.2f}", f"{ratios[least]:.2f} ({least})"])
    return rows


def first_choices() -> Rows:
    """Losses of performance of the orders as shipped."""
    (shipped,) = (e for e in results_of("choice_quality_h200") if (e["layer"], e["over"], e["way"]) == ("all", "space", "shipped"))
    (published,) = (e for e in results_of("published_v100") if (e["layer"], e["model"]) == ("all", "detailed"))
    (sealed,) = (e for e in results_of("sealed_set_h200") if (e["class"], e["layer"], e["way"]) == ("all", "all", "shipped"))
    says = {
        "H200, all schemas, 60 random convolutions, drawn after the earlier model that is judged was frozen (`sealed_set_h200`)": sealed,
        "H200, all schemas, 20 layers of ResNet-18, Yolo-9000, DefoNet (`choice_quality_h200`)": shipped,
        "CNNOpt's published V100 kernels of the same layers (`published_v100`)": published,
    }
    rows = [["of the first choices", "LoP@1", "LoP@10", "LoP@30", "trials to 95 % / 99 %, mean"]]
    for name, entry in says.items():
        losses = (f"{percent(entry[f'lop@{count}'], 2)} %" for count in (1, 10, 30))
        rows.append([name, *losses, f"{entry['trials_95']:.1f} / {entry['trials_99']:.1f}"])
    return rows


def sealed() -> Rows:
    """Losses of first choices on problems drawn after the models were frozen."""
    says = {
        "batch": "batch above 1", "groups": "groups or depthwise", "forms": "dilation, one or three dimensions", "3x3": "plain 3x3", "1x1": "1x1",
        "first": "first layers", "all": "**all**",
    }  # fmt: skip
    found = {(e["class"], e["way"]): e for e in results_of("sealed_set_h200") if e["layer"] == "all"}
    rows = [["class", "problems", "formulas: LoP@1, LoP@10 %", "as shipped: LoP@1, LoP@10 %", "worst LoP@1 %", "trials to 99 %, mean"]]
    for name, words in says.items():
        formulas, shipped = found[name, "analytical"], found[name, "shipped"]
        losses = (f"{percent(entry['lop@1'])}, {percent(entry['lop@10'])}" for entry in (formulas, shipped))
        rows.append([words, str(shipped["layers"]), *losses, percent(shipped["worst lop@1"]), f"{shipped['trials_99']:.1f}"])
    return rows


def attention_native() -> Rows:
    """Attention on a CPU: the first candidate of the models, the best of those measured, the plan without attention, PyTorch."""
    rows = [["shape", "first choice, ms", "best of three", "regions apart", "PyTorch", "PyTorch / first choice"]]
    for name in dict.fromkeys(entry["network"] for entry in results_of("attention_native")):
        measured = {e["contender"]: e["median_seconds"] for e in results_of("attention_native") if e["network"] == name}
        own = [e["median_seconds"] for e in results_of("attention_native") if e["network"] == name and "predicted_seconds" in e]
        theirs = min(measured["torch"], measured["torch math"])
        cells = (1e3 * seconds for seconds in (own[0], min(own), measured["apart"], theirs))
        rows.append([name, *(f"{cell:.3g}" for cell in cells), f"{theirs / own[0]:.2f}"])
    return rows


def recurrent() -> Rows:
    """Recurrent layers on a CPU: one kernel for all steps, kernels of one step, and the fastest peer; by number of threads."""
    rows = [["workload", "threads", "one kernel, ms", "kernels of one step", "PyTorch", "ONNX Runtime", "fastest other / one kernel"]]
    entries = [entry for name in ("recurrent_1_thread", "recurrent_2_threads") for entry in results_of(name)]
    ratios: dict[int, list[float]] = {}
    for network, threads in dict.fromkeys((entry["network"], entry["threads"]) for entry in entries):
        measured = {e["contender"]: e["median_seconds"] for e in entries if (e["network"], e["threads"]) == (network, threads)}
        cells = [measured[name] for name in ("tilewright", "tilewright by steps", "eager", "onnxruntime")]
        ratios.setdefault(threads, []).append(min(cells[2:]) / cells[0])
        rows.append([network, str(threads), *(f"{1e3 * seconds:.3g}" for seconds in cells), f"{ratios[threads][-1]:.2f}"])
    for threads, found in ratios.items():
        rows.append(["**geometric mean**", str(threads), "", "", "", "", f"{statistics.geometric_mean(found):.2f}"])
    return rows


def chains() -> Rows:
    """Chains of convolutions on a CPU in one kernel and in separate ones, and what the models made of them; by number of threads."""
    rows = [["chain", "threads", "separate, us", "one kernel, us", "ratio", "predicted ratio", "decision"]]
    for threads in (1, 2):
        for entry in results_of(f"chains_{threads}"):
            separate, merged = (entry["seconds"][name] for name in ("separate", "merged"))
            ratio, predicted = separate / merged, entry["predicted"]["apart"] / entry["predicted"]["chain"]
            wrong = entry["taken"] != (ratio > 1) and abs(ratio - 1) > 0.03
            said = f"{'merged' if entry['taken'] else 'separate'}{', wrong' if wrong else ''}"
            cells = (f"{1e6 * separate:.0f}", f"{1e6 * merged:.0f}", f"{ratio:.2f}", f"{predicted:.2f}")
            rows.append([f"{entry['name']} ({entry['chain']})", str(threads), *cells, said])
    return rows


def chain_decisions() -> Rows:
    """How well the gains of chains are predicted: of random ones drawn after the constants were fixed, and of networks."""
    header = "chains, threads, number, merged, their gain, of these slower by 3 %, not merged but 3 % faster, right, rank correlation"
    rows = [header.split(", ")]
    for name, text in (("chains_sealed", "random"), ("chains", "of networks")):
        for threads in (1, 2):
            said = results_of(f"{name}_{threads}", "settings")
            found = [(e["taken"], e["seconds"]["separate"] / e["seconds"]["merged"]) for e in results_of(f"{name}_{threads}") if "seconds" in e]
            lost, missed = sum(taken and gain < 0.97 for taken, gain in found), sum(not taken and gain > 1.03 for taken, gain in found)
            cells = (str(said["chains"]), str(said["taken"]), f"{said['gain of taken']:.2f}", str(lost), str(missed), percent(said["right"], 0))
            rows.append([text, str(threads), *cells, f"{said['rank correlation']:.2f}"])
    return rows


def chained_networks() -> Rows:
    """Networks on a CPU with chains and without."""
    rows = [["network", "threads", "without chains, ms", "with chains, ms", "ratio", "chains of regions", "compiled, s"]]
    for threads in (1, 2):
        entries, ratios = results_of(f"fusion_{threads}"), []
        for first, second in zip(entries[::2], entries[1::2], strict=True):
            ratios.append(first["median_seconds"] / second["median_seconds"])
            times = (f"{1e3 * entry['median_seconds']:.2f}" for entry in (first, second))
            compiled = f"{first['seconds']:.1f}, {second['seconds']:.1f}"
            counts = f"{second['chains']} of {second['regions']}"
            rows.append([first["network"], str(threads), *times, f"{ratios[-1]:.2f}", counts, compiled])
        rows.append(["**geometric mean**", str(threads), "", "", f"{statistics.geometric_mean(ratios):.2f}", "", ""])
    return rows


def tuned() -> Rows:
    """What 20 trials a region gain on networks whose layers nobody trained with, by batch; the last measurement of each counts."""
    measured = [row for part in (1, 2, 3, 4) for row in results_of(f"tuned_compile_h200_{part}") if row["network"] != "all"]
    gains = {(row["network"], row["batch"]): row.get("gain") for row in measured}
    batches = sorted({batch for _, batch in gains})
    rows = [["network", *(f"batch {batch}: gain %" for batch in batches)]]
    for network in sorted({network for network, _ in gains}):
        rows.append([network, *(percent(gains.get((network, batch))) for batch in batches)])
    for name, combine in (("mean", statistics.fmean), ("largest", max)):
        known = ([gain for (_, own), gain in gains.items() if own == batch and gain is not None] for batch in batches)
        rows.append([f"**{name} of those measured**", *(percent(combine(found)) for found in known)])
    return rows


def compile_times() -> Rows:
    """Seconds to compile for machines that are not there or have no data of their own, on two cores."""
    rows = [["network", "target", "empty kernel cache, s", "besides PyTorch's export, s", "full cache, besides export, s"]]
    for entry in (*results_of("compile_time_targets"), *results_of("compile_time_avx2")):
        cold, warm = entry["cold"], entry["warm"]
        seconds = (cold["compile"], cold["compile_besides_export"], warm["compile_besides_export"])
        rows.append([entry["network"], entry["target"], *(f"{value:.1f}" for value in seconds)])
    return rows


def simulated_misses() -> Rows:
    """Predicted cache misses of CPU kernels against those that cachegrind simulates."""
    parts = {"layers": "schedules of layers", "network": "MobileNetV2"}
    ways = {"predicted": "this model", "paper's rule": "the paper's rule (`bench/tuna_misses.py`)"}
    rows = [["kernels", "level", "way", "median error", "nine in ten below", "largest", "rank correlation", "within layers"]]
    for entry in results_of("cache_misses", "settings")["summary"]:
        errors = [f"{percent(entry[key])} %" for key in ("median error", "error of nine in ten at most", "largest error")]
        within = entry.get("mean rank correlation within layers")
        cells = [parts[entry["of"]], f"L{entry['level']}", ways[entry["way"]], *errors, f"{entry['rank correlation']:.3f}"]
        rows.append([*cells, "" if within is None else f"{within:.2f}"])
    return rows


def scheduled_loops() -> Rows:
    """Cycles of inner loops by our list scheduling against llvm-mca."""
    rows = [["target", "loops", "median error", "ours / llvm-mca, 5 % to 95 %", "rank correlation"]]
    for entry in results_of("pipeline_check", "settings")["figures"]:
        loops = entry["all"]
        least, *_, most = loops["ours / theirs, quantiles 5 25 50 75 95"]
        ratio = f"{least:.2f} to {most:.2f}"
        rows.append([entry["target"], str(loops["loops"]), f"{percent(loops['median error'])} %", ratio, f"{loops['rank correlation']:.3f}"])
    return rows


TABLES: Mapping[str, Callable[[], Rows]] = MappingProxyType(
    {
        made.__name__: made
        for made in (
            spaces, bounds, pruning, outliers, predicted_transactions, counted_transactions, top_ratios, refitted, compared_models,
            published_training, published, choices, searches, code_scores, learned_on_cpus, calibrated_choices, adapted, networks, speed_ups,
            first_choices, sealed, attention_native, recurrent, chains, chain_decisions, chained_networks, tuned, compile_times, simulated_misses,
            scheduled_loops,
        )
    }
)  # fmt: skip


def markdown(rows: Rows) -> str:
    """The rows as a Markdown table, the header first."""
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def rewritten(text: str) -> tuple[str, list[str]]:
    """A page with all its tables regenerated, and the names of those that differed.

    Raises:
        SystemExit: for an unknown table.
    """
    differing: list[str] = []

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise SystemExit(f"no table {name}: known are {', '.join(TABLES)}")
        table = markdown(TABLES[name]())
        if table != match["body"]:
            differing.append(name)
        return f"<!-- table {name} -->\n{table}<!-- end -->"

    return BLOCK.sub(made, text), differing


def differences(write: bool = False) -> Iterator[str]:
    """Tables that differ from their result files, as "page: name"; rewritten on request."""
    for page in PAGES:
        text, names = rewritten(page.read_text())
        yield from (f"{page.relative_to(ROOT)}: {name}" for name in names)
        if write and names:
            page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a table differs from its file")
    options = parser.parse_args()
    found = list(differences(write=not options.check))
    for name in found:
        print(name)
    sys.exit(bool(found and options.check))


if __name__ == "__main__":
    main()
