"""Tables of the documentation about times on GPUs: trials, recurrent layers, layouts, workloads and chains. Each function returns rows of cells, the
header first."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any

from bench.cells import Rows, percent, results_of
from bench.chains import summary
from bench.common import RESULTS


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


GPU_TIME_TABLES = (
    half_chains,
    half_chain_models,
    search_times,
    gpu_layouts,
    tuned,
    gpu_recurrent,
    against_before,
    gpu_chain_times,
    recurrent_many,
    recurrent_both,
    workloads,
    kernel_kinds,
)
