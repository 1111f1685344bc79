"""Tables of the documentation about models of GPUs: each function returns rows of cells, the header first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.cells import Rows, percent, results_of


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
    files = ("sealed_set_h200", "sealed_set_h100", "sealed_set_tensor_h200", "sealed_set_tensor_h200_2", "sealed_set_tensor_h200_3")
    sealed, later, tensor, second, today = (
        e for file in files for e in results_of(file) if (e["class"], e["layer"], e["way"]) == ("all", "all", "shipped")
    )
    says = {
        "H200, all schemas, 60 random convolutions, none of which the models that are judged were trained with (`sealed_set_h200`)": sealed,
        "an H100, the same models, 60 others, drawn after these were frozen (`sealed_set_h100`)": later,
        "H200, 42 random layers of up to 500 GFLOP in 16 bits and TF32, drawn after the models were frozen (`sealed_set_tensor_h200`)": tensor,
        "H200, 42 others, the models after these (`sealed_set_tensor_h200_2`)": second,
        "H200, 42 others, the models of today (`sealed_set_tensor_h200_3`)": today,
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


GPU_TABLES = (
    spaces,
    bounds,
    pruning,
    predicted_transactions,
    counted_transactions,
    top_ratios,
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
    sealed,
)
