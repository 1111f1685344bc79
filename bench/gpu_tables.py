"""Tables of the documentation about GPUs: each function returns rows of cells, the header first."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from bench.cells import Rows, percent, results_of
from bench.chains import summary
from bench.common import RESULTS


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


def compared_tensor_models() -> Rows:
    """Orders of kernels on tensor cores of random layers: formulas, DeepGEMM's closed form, and training methods."""
    says = {"analytical": "formulas", "closed form": "DeepGEMM's closed form", "ours": "one boosted correction, as shipped then"}
    rows = [["order", "LoP@1 %", "LoP@10 %", "LoP@30 %", "rank correlation"]]
    for entry in results_of("model_comparison_tensor_h100"):
        losses = (percent(entry[f"lop@{count}"]) for count in (1, 10, 30))
        rows.append([says.get(entry["model"], entry["model"]), *losses, f"{entry['spearman']:.2f}"])
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
        ("measured", "random order"): "random order of the measured candidates",
    }
    found = {(entry["over"], entry["way"]): entry for entry in results_of("choice_quality_h200") if entry["layer"] == "all"}
    rows = [["order", "LoP@1 %", "LoP@10 %", "LoP@30 %", "trials to 95 %: mean, median", "to 99 %: mean, median"]]
    for way, name in says.items():
        losses = (percent(found[way][f"lop@{count}"]) for count in (1, 10, 30))
        trials = (f"{found[way][f'trials_{share}']:.3g}, {found[way][f'median trials_{share}']:.3g}" for share in (95, 99))
        rows.append([name, *losses, *trials])
    return rows


def transferred() -> Rows:
    """Models of one GPU that rank the direct kernels of another: means over layers."""
    rows = [["judged", "trained on", "target", "LoP@1 %", "LoP@10 %", "LoP@30 %", "rank correlation"]]
    for entry in results_of("transfer"):
        losses = (percent(entry[f"lop@{count}"]) for count in (1, 10, 30))
        rows.append([entry["judged"], entry["trained"], entry["target"] or "", *losses, f"{entry['spearman']:.2f}"])
    return rows


def scores_v100() -> Rows:
    """Scores by the terms that need no assembly, on the published kernels of a V100."""
    says = {
        "terms, fitted on the h200": "named terms, fitted on the H200", "linear, fitted on the h200": "linear combination, fitted on the H200",
        "terms, not fitted": "named terms, not fitted", "terms, fitted on the v100": "named terms, fitted on the V100's training files",
    }  # fmt: skip
    found = {entry["score"]: entry for entry in results_of("gpu_score_v100")}
    losses = ([f"{percent(found[score][f'lop@{count}'])} %" for count in (1, 10, 30)] for score in says)
    return [["", "LoP@1", "LoP@10", "LoP@30"], *([name, *cells] for name, cells in zip(says.values(), losses, strict=True))]


def searches() -> Rows:
    """How far the best of some evaluations is from the best of the space, in the mean."""
    says = {"ours": "`evolve`", "pycma": "pycma", "printed": "algorithm 4 as printed", "random": "random"}
    columns = [("h200", "H200", count) for count in (50, 100, 200, 400)] + [("cortex-a53", "Cortex-A53", count) for count in (20, 40, 80)]
    found = {(entry["target"], entry["search"], entry["evaluations"]): entry for entry in results_of("evolution") if "mean_loss" in entry}
    rows = [["evaluations", *(f"{name}: {count}" for _, name, count in columns)]]
    for search, name in says.items():
        rows.append([name, *(f"{percent(found[target, search, count]['mean_loss'])} %" for target, _, count in columns)])
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


def first_choices() -> Rows:
    """Losses of performance of the orders as shipped."""
    (shipped,) = (e for e in results_of("choice_quality_h200") if (e["layer"], e["over"], e["way"]) == ("all", "space", "shipped"))
    (published,) = (e for e in results_of("published_v100") if (e["layer"], e["model"]) == ("all", "detailed"))
    files = ("sealed_set_h200", "sealed_set_h100", "sealed_set_tensor_h200")
    sealed, later, tensor = (e for file in files for e in results_of(file) if (e["class"], e["layer"], e["way"]) == ("all", "all", "shipped"))
    says = {
        "H200, all schemas, 60 random convolutions, none of which the models that are judged were trained with (`sealed_set_h200`)": sealed,
        "an H100, the same models, 60 others, drawn after these were frozen (`sealed_set_h100`)": later,
        "H200, 42 random layers of up to 500 GFLOP in 16 bits and TF32, drawn after the models were frozen (`sealed_set_tensor_h200`)": tensor,
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
    headings = ("formulas: LoP@1, LoP@10 %", "as shipped: LoP@1, LoP@10 %", "worst LoP@1 %", "trials to 99 %, mean")
    rows = [["GPU", "class", "problems", *headings]]
    for gpu in ("h200", "h100"):
        found = {(e["class"], e["way"]): e for e in results_of(f"sealed_set_{gpu}") if e["layer"] == "all"}
        for name, words in says.items():
            formulas, shipped = found[name, "analytical"], found[name, "shipped"]
            losses = (f"{percent(entry['lop@1'])}, {percent(entry['lop@10'])}" for entry in (formulas, shipped))
            cells = (*losses, percent(shipped["worst lop@1"]), f"{shipped['trials_99']:.1f}")
            rows.append([gpu.upper(), words, str(shipped["layers"]), *cells])
    return rows


def tuned() -> Rows:
    """What 20 trials a region gain on networks whose layers nobody trained with, by batch; the last measurement of each counts."""
    files = (*(f"tuned_compile_h200_{part}" for part in range(1, 9)), "tuned_compile_h100_densenet121")
    measured = [row for file in files for row in results_of(file) if row["network"] != "all"]
    gains = {(row["network"], row["batch"]): row.get("gain") for row in measured}
    batches = sorted({batch for _, batch in gains})
    rows = [["network", *(f"batch {batch}: gain %" for batch in batches)]]
    for network in sorted({network for network, _ in gains}):
        rows.append([network, *(percent(gains.get((network, batch))) for batch in batches)])
    for name, combine in (("mean", statistics.fmean), ("largest", max)):
        known = ([gain for (_, own), gain in gains.items() if own == batch and gain is not None] for batch in batches)
        rows.append([f"**{name} of those measured**", *(percent(combine(found)) for found in known)])
    return rows


def gpu_recurrent() -> Rows:
    """Recurrent layers in one persistent kernel against a kernel for each step and cuDNN."""
    return recurrent_rows("gpu_recurrent", "layer")[0]


def recurrent_ways(file: str) -> Iterator[tuple[str, dict[str, dict[str, Any]], float]]:
    """Each recurrent layer with what was measured of it, by contender, and the seconds of the faster of cuDNN's ways."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in results_of(file):
        if entry["median_seconds"]:
            found.setdefault(entry["network"], {})[entry["contender"]] = entry
    for layer, ways in found.items():
        yield layer, ways, min(entry["median_seconds"] for contender, entry in ways.items() if contender.startswith("cuDNN"))


def recurrent_rows(file: str, heading: str) -> tuple[Rows, list[float]]:
    """The rows of recurrent layers, and how many times as fast as the faster of cuDNN's ways one kernel is."""
    rows = [[heading, "one kernel, us", "predicted, us", "kernels of one step, us", "cuDNN, us", "cuDNN / one kernel"]]
    ratios = []
    for layer, ways, cudnn in recurrent_ways(file):
        own, steps = ways["tilewright"], ways["tilewright by steps"]
        ratios.append(cudnn / own["median_seconds"])
        seconds = (own["median_seconds"], own["predicted_seconds"], steps["median_seconds"], cudnn)
        rows.append([layer, *(f"{1e6 * value:.0f}" for value in seconds), f"{ratios[-1]:.2f}"])
    return rows, ratios


LAYOUT_ALTERNATIVES = {
    "comparing bounds": "bounds compared at each load of the input, no copy", "for the sums": "a copy of the input with channels innermost",
    "copied from": "a result stored with channels innermost, and copied", "in which a reader reads": "the order in which a reader reads",
}  # fmt: skip
"""What `bench.layouts` tells about alternatives, by a part of the text."""


def gpu_layouts() -> Rows:
    """What storing values otherwise than by rule is predicted and measured to gain on a GPU, by kind of alternative."""
    rows = [["alternative", "measured", "signs right where 10 % are predicted", "predicted to gain", "these, measured", "at worst"]]
    found = [entry for part in (1, 2) for entry in results_of(f"layouts_h100_{part}")]
    for part, told in LAYOUT_ALTERNATIVES.items():
        own = [entry for entry in found if part in entry["told"]]
        ratios = [[times[1] / times[0] for times in (entry["predicted"], entry["seconds"])] for entry in own]
        clear = [(predicted < 1) == (measured < 1) for predicted, measured in ratios if abs(predicted - 1) > 0.1]
        gaining = [measured for predicted, measured in ratios if predicted < 0.99]
        cells = (f"{statistics.geometric_mean(gaining):.2f}", f"{max(gaining):.2f}") if gaining else ("–", "–")
        rows.append([told, str(len(own)), f"{sum(clear)} of {len(clear)}", str(len(gaining)), *cells])
    return rows


WORKLOADS = "gpu_workloads_h100_*.json"
"""Files with workloads, each of one or several runs."""
CONTENDERS = {
    "eager_cl": "eager, channels last", "inductor": "Inductor", "none": "ours, nothing fused", "tilewright": "ours, fused in registers",
    "chains": "ours, chains too", "vendor": "ours or a library, by trials",
}  # fmt: skip
"""The contenders of the workloads besides eager, in the order of columns."""


def workload_times() -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """By workload (network, batch) the measured rows of its contenders, each with its speed-up over eager in the same run (`over_eager`). Of several
    runs the last one counts. Empty if nothing was measured."""
    rows = [{**row, "run": (path.stem, row["run"])} for path in sorted(RESULTS.glob(WORKLOADS)) for row in results_of(path.stem)]
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {key: {} for key in sorted({(row["network"], row["batch"]) for row in rows})}
    eager = {row["run"]: row["median_seconds"] for row in rows if row["contender"] == "eager" and row["median_seconds"]}
    for row in rows:
        if row["median_seconds"] and row["run"] in eager:
            over = eager[row["run"]] / row["median_seconds"]
            found[row["network"], row["batch"]][row["contender"]] = {**row, "over_eager": over}
    return found


PEERS = ("eager", "eager_cl", "inductor")


def leading(workloads: Iterable[Mapping[str, Mapping[str, Any]]], contender: str) -> int:
    """Workloads in which the contender is at least as fast as every peer."""
    return sum(
        found[contender]["median_seconds"] <= min(found[peer]["median_seconds"] for peer in PEERS if peer in found)
        for found in workloads
        if contender in found
    )


def workloads() -> Rows:
    """The workloads of DeepCuts' figures 5 to 7: how much faster than eager PyTorch each contender is, beside bounds and what libraries compute."""
    times = workload_times()
    rows = [["network", "batch", "eager, ms", *CONTENDERS.values(), "fastest peer / ours or a library", "bound / ours", "operations by libraries"]]
    for (network, batch), found in times.items():
        ratios = (f"{found[name]['over_eager']:.2f}" if name in found else "–" for name in CONTENDERS)
        own, mixed = found.get("tilewright"), found.get("vendor")
        eager = f"{1e3 * found['eager']['median_seconds']:.3g}" if found else "–"
        peers = [found[name]["median_seconds"] for name in PEERS if name in found]
        against = f"{min(peers) / mixed['median_seconds']:.2f}" if mixed and peers else "–"
        bound = f"{percent(own['bound_seconds'] / own['median_seconds'], 0)} %" if own else "–"
        share = f"{percent(mixed['library_flops'] / max(mixed['flops'], 1), 0)} %" if mixed else "–"
        rows.append([network, str(batch), eager, *ratios, against, bound, share])
    for words, least, most in (("batch 1", 1, 1), ("batch 64 and more", 64, 1 << 31)):
        known = [found for (_, batch), found in times.items() if least <= batch <= most]
        ratios_of = ([found[name]["over_eager"] for found in known if name in found] for name in CONTENDERS)
        means = (f"{statistics.geometric_mean(found):.2f}" if found else "–" for found in ratios_of)
        if known:
            rows.append([f"**geometric mean, {words}**", "", "", *means, "", "", ""])
    ready = ([found[name]["prepare_seconds"] for found in times.values() if name in found] for name in CONTENDERS)
    if times:
        rows.append(["**mean time to prepare, s**", "", "", *(f"{statistics.fmean(found):.1f}" if found else "–" for found in ready), "", "", ""])
        rows.append(
            [
                "**no peer is faster, of**",
                str(len(times)),
                "",
                *(str(leading(times.values(), name)) if name not in PEERS else "" for name in CONTENDERS),
                "",
                "",
                "",
            ]
        )
    return rows


def kernel_kinds() -> Rows:
    """The time of kernels by kind at batch 1, DeepCuts' figure 6."""
    kinds = ("complex", "complex fused", "simple", "simple fused")
    rows = [["network", "contender", *(f"{kind}, us" for kind in kinds)]]
    for (network, _), found in workload_times().items():
        for name, words in {"eager": "eager", **CONTENDERS}.items():
            seconds = found.get(name, {}).get("kernel_seconds")
            if seconds:
                rows.append([network, words, *(f"{1e6 * seconds[kind]:.0f}" for kind in kinds)])
    return rows


def against_before() -> Rows:
    """Networks at batch 1 in float32 as they were compiled before regions were merged by prediction, and as they are compiled today."""
    rows = [["network", "before, us", "today, us", "before / today", "kernels' regions"]]
    ratios = []
    found = results_of("against_h100")
    for today, before in zip(found[::2], found[1::2], strict=True):
        ratios.append(before["median_seconds"] / today["median_seconds"])
        times = (f"{1e6 * row['median_seconds']:.0f}" for row in (before, today))
        rows.append([today["network"], *times, f"{ratios[-1]:.2f}", f"{before['regions']}, {today['regions']}"])
    rows.append(["**geometric mean**", "", "", f"{statistics.geometric_mean(ratios):.2f}", ""])
    return rows


def recurrent_many() -> Rows:
    """The same of many sequences in float16 on tensor cores."""
    rows, ratios = recurrent_rows("gpu_recurrent_many", "layer, float16")
    return [*rows, ["**geometric mean**", "", "", "", "", f"{statistics.geometric_mean(ratios):.2f}"]]


def recurrent_both() -> Rows:
    """Recurrent layers of both directions, as one loop and as two kernels, and which of them is taken."""
    rows = [["layer, both directions", "one loop, us; predicted", "two kernels, us; predicted", "taken", "cuDNN, us", "cuDNN / taken"]]
    ratios = []
    for layer, ways, cudnn in recurrent_ways("gpu_recurrent_both"):
        own = {"one loop": ways["tilewright joined"], "two kernels": ways["tilewright apart"]}
        taken = min(own, key=lambda way: own[way]["predicted_seconds"])
        ratios.append(cudnn / own[taken]["median_seconds"])
        times = (f"{1e6 * entry['median_seconds']:.0f}; {1e6 * entry['predicted_seconds']:.0f}" for entry in own.values())
        rows.append([layer.removesuffix(", both directions"), *times, taken, f"{1e6 * cudnn:.0f}", f"{ratios[-1]:.2f}"])
    return [*rows, ["**geometric mean**", "", "", "", "", f"{statistics.geometric_mean(ratios):.2f}"]]


def gpu_chain_times() -> Rows:
    """Chains of convolutions on a GPU in one kernel and in separate ones, and what the models made of them."""
    rows = [["chain", "separate, us", "cuDNN, us", "best predicted, us", "ratio", "predicted ratio", "best of all, ratio", "decision"]]
    for entry in results_of("gpu_chains_judged"):
        seconds, predicted = entry["seconds"], entry["predicted"]
        separate, merged = seconds["separate"], seconds["merged"]
        best = separate / min(each for name, each in seconds.items() if name != "separate")
        decided = f"{'merged' if entry['taken'] else 'separate'}{', wrong' if entry['taken'] != (separate > merged) else ''}"
        times = (f"{1e6 * each:.1f}" for each in (separate, min(entry["cudnn"].values()), merged))
        ratios = (f"{each:.2f}" for each in (separate / merged, predicted["apart"] / predicted["chain"], best))
        rows.append([f"{entry['name']} ({entry['chain']})", *times, *ratios, decided])
    said = summary(results_of("gpu_chains_judged"))
    taken = f"{said['taken']} merged, {said['wrongly taken']} of them slower"
    rows.append([f"**{said['chains']} chains**", "", "", "", f"{said['gain of taken']:.2f} of the merged", "", "", taken])
    return rows


def half_chains() -> Rows:
    """Random chains in float16 by the predicted time of separate kernels: how many are faster as one, and what models take that were not trained on
    them."""
    rows = [["predicted apart, us", "chains", "faster in one kernel", "taken", "of these slower", "programs of those taken / separate"]]
    found = results_of("gpu_chain_model")
    for low, high in itertools.pairwise((0, 4, 5, 6, 7, 10, inf)):
        those = [entry for entry in found if low <= 1e6 * entry["apart"] < high]
        chosen = [entry["learned"]["ratio"] for entry in those if entry["learned"]["taken"]]
        ratio = f"{statistics.geometric_mean(chosen):.2f}" if chosen else "–"
        label = f"{low} to {high}" if high < inf else f"{low} and more"
        faster = sum(entry["least"] < 1 for entry in those)
        rows.append([label, str(len(those)), str(faster), str(len(chosen)), str(sum(each > 1 for each in chosen)), ratio])
    return rows


def half_chain_models() -> Rows:
    """What ways of prediction decide of the random chains in float16."""
    rows = [["predicted by", "time that chosen tiles lose, % of the program's", "programs / those of separate kernels"]]
    for name, text in (("formulas", "formulas, two constants"), ("learned", "learned correction"), ("best", "knowing all times")):
        decided = [entry[name] for entry in results_of("gpu_chain_model")]
        ratio = statistics.geometric_mean(entry["ratio"] if entry["taken"] else 1.0 for entry in decided)
        rows.append([text, f"{100 * statistics.fmean(entry['loss'] for entry in decided):.1f}", f"{ratio:.3f}"])
    return rows


def search_times() -> Rows:
    """Seconds of processor time that a search with predicted chains takes, and that the commit before took, in turns."""
    rows = [["network", "search before, s", "now, s", "before / now", "chains before, s", "now, s", "before / now"]]
    entries = results_of("search_time_against")
    now, before = ({entry["network"]: entry["medians"] for entry in entries if entry["checkout"] == name} for name in ("this", "against"))
    for network, own in now.items():
        pairs = [(before[network][key], own[key]) for key in ("search", "chains")]
        rows.append([network, *(cell for old, new in pairs for cell in (f"{old:.1f}", f"{new:.1f}", f"{old / new:.2f}"))])
    return rows


GPU_TABLES = (
    spaces,
    bounds,
    pruning,
    predicted_transactions,
    counted_transactions,
    top_ratios,
    half_chains,
    half_chain_models,
    search_times,
    refitted,
    compared_models,
    compared_tensor_models,
    published_training,
    published,
    choices,
    transferred,
    scores_v100,
    searches,
    adapted,
    first_choices,
    gpu_layouts,
    sealed,
    tuned,
    gpu_recurrent,
    against_before,
    gpu_chain_times,
    recurrent_many,
    recurrent_both,
    workloads,
    kernel_kinds,
)
