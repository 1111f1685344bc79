"""Tables of the documentation about CPUs: each function returns rows of cells, the header first."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.cells import Rows, percent, power, results_of
from bench.chains import summary
from bench.common import RESULTS
from bench.first_day import speed_ups as faster


def outliers() -> Rows:
    """Errors of Winograd's algorithm around outliers."""
    return _around_outliers(results_of("winograd_numerics"))


def outliers_of_large_filters() -> Rows | None:
    """Errors of Fourier transforms around outliers; None until they are measured."""
    return _around_outliers(results_of("fourier_numerics")) if (RESULTS / "fourier_numerics.json").exists() else None


def large_filters() -> Rows | None:
    """Layers with large filters on a CPU; None until they are measured."""
    return filters_of("large_filters") if (RESULTS / "large_filters.json").exists() else None


def large_filters_on_a_gpu() -> Rows:
    """Layers with large filters on a GPU."""
    return filters_of("large_filters_h100")


def long_filters() -> Rows:
    """Layers with filters of one row or column on a CPU."""
    return filters_of("long_filters")


def winograd_errors() -> Rows:
    """Errors of tiles by Winograd's algorithm, by filters and results of a tile along each dimension."""
    found = results_of("winograd_errors")
    sizes = sorted({entry["results"] for entry in found})
    rows = [["filters", *(f"m = {size}" for size in sizes)]]
    for down, across in dict.fromkeys(tuple(entry["filter"]) for entry in found):
        errors = {entry["results"]: power(entry["error"]) for entry in found if entry["filter"] == [down, across]}
        rows.append([f"{down}x{across}", *(errors.get(size, "–") for size in sizes)])
    return rows


def filters_of(name: str) -> Rows:
    """Layers with large filters by direct sums, by the transform with the least time, and by PyTorch: milliseconds, and errors."""
    rows = [["layer", "direct sums", "fastest transform", "", "models' choice", "PyTorch, best layout", "error of direct sums", "of the transform"]]
    results = results_of(name)
    for layer in dict.fromkeys(entry["network"] for entry in results):
        timed = {entry["contender"]: entry for entry in results if entry["network"] == layer and entry["median_seconds"] is not None}
        direct, chosen = timed.pop("direct sums"), timed.pop("tilewright")
        peers = [timed.pop(peer) for peer in ("eager", "eager_nhwc", "eager_cl") if peer in timed]
        best, peer = (min(entries, key=lambda entry: entry["median_seconds"], default=None) for entries in (timed.values(), peers))
        ways = (direct, best, chosen, peer)
        times = [milliseconds(way["median_seconds"]) if way is not None else "–" for way in ways]
        errors = [power(way["relative_error"]) if way is not None else "–" for way in (direct, best)]
        rows.append([layer, times[0], times[1], best["contender"] if best is not None else "", *times[2:], *errors])
    return rows


def _around_outliers(found: Sequence[Mapping[str, Any]]) -> Rows:
    sizes = list(found[0]["beside an outlier of"])
    rows = [["", "no outlier", *(f"outlier {power(float(size)).replace('.0', '')}" for size in sizes), "pixels spoilt by an infinity"]]
    for entry in found:
        errors = (power(entry["beside an outlier of"][size]) for size in sizes)
        name = "PyTorch (oneDNN)" if entry["way"] == "PyTorch" else entry["way"]
        rows.append([name, power(entry["usual"]), *errors, str(entry["pixels spoilt by an infinity"])])
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
    """What the forest makes of the order of the models, with and without data of the machine. Losses of the first have the number of problems whose
    first choice was measured, if it was not for all."""
    says = {
        "conv2d": "convolutions, all schedules", "winograd conv2d": "Winograd alone", "direct conv2d": "direct alone",
        "depthwise": "depthwise", "batched product": "batched products", "all problems": "all problems",
    }  # fmt: skip
    means = [entry for entry in results_of("cpu_learned") if entry["layer"] == "all"]
    rows = [["machine", "means of", "ranked by", "loss of the first", "median", "loss of ten", "top-10 ratio", "top-50 ratio"]]
    for machine in dict.fromkeys(entry["machine"] for entry in means):
        for kind, name in says.items():
            for entry in means:
                if (entry["machine"], entry["kind"]) != (machine, kind):
                    continue
                losses = [f"{percent(entry[key])} %" if key in entry else "" for key in ("loss", "median loss", "loss of ten")]
                if losses[0] and (unknown := entry["first choices not measured"]):
                    losses[0] += f" (of {entry['layers'] - unknown})"
                ratios = (f"{entry[key]:.3f}" if (key := f"ratio of {count}") in entry else "" for count in (10, 50))
                rows.append([machine, f"{name} ({entry['layers']})", entry["ranked by"], *losses, *ratios])
    return rows


def learned_on_random_problems() -> Rows:
    """Losses of the first choice over the random problems that the forest learns from, each left out of the training."""
    says = {"models and forest": "models and forest, a quarter of the problems left out"}
    rows = [["core", "random problems", "ranked by", "loss of the first", "median"]]
    for entry in results_of("cpu_learned_random"):
        core, _, which = entry["machine"].partition(", ")
        if which == "all":
            losses = (f"{percent(entry[key])} %" for key in ("loss", "median loss"))
            rows.append([core, str(entry["problems"]), says.get(entry["ranked by"], entry["ranked by"]), *losses])
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

    files = ("gpu_networks_h200", "cpu_networks_peers", "cpu_networks_16_threads", "cpu_networks_zen5", "cpu_networks_zen3")
    gpu, *cpus = map(medians, files)
    eager, others = ("eager", "eager_cl"), (("eager", "eager_cl", "inductor"), ("onnxruntime",), ("openvino",))
    where = ("Xeon, 2 threads", "Xeon, 16 threads", "EPYC, 2 threads", "EPYC (Zen 3), 2 threads")
    rows = [["ms", "ours, H200", "eager, H200", *(f"{name}, {cpu}" for cpu in where for name in ("ours", "PyTorch", "onnxruntime", "OpenVINO"))]]
    for name in dict.fromkeys(network for times in cpus for network in times):
        on_cpu = (cells(times.get(name, {}), ("tilewright",), *others) for times in cpus)
        rows.append([name, *cells(gpu.get(name, {}), ("tilewright",), eager), *itertools.chain(*on_cpu)])
    return rows


def speed_ups() -> Rows:
    """The time of the best other contender over ours on CPUs."""
    both = medians("cpu_networks_peers").keys() & medians("cpu_networks_16_threads").keys()
    three = medians("cpu_networks_zen3_left_out").keys()
    rows = [["CPU", "networks", "best peer / ours: geometric mean", "least"]]
    for what, name, kept in (
        ("Xeon, 2 threads", "cpu_networks_peers", None), ("Xeon, 2 threads, networks of both", "cpu_networks_peers", both),
        ("Xeon, 16 threads, networks of both", "cpu_networks_16_threads", both), ("Xeon, 16 threads", "cpu_networks_16_threads", None),
        ("EPYC, 2 threads", "cpu_networks_zen5", None), ("EPYC (Zen 3), 2 threads, without data of it", "cpu_networks_zen3", None),
        ("EPYC (Zen 3), 2 threads, with data of it", "cpu_networks_zen3_known", None),
        ("EPYC (Zen 3), 2 threads, without data of it, networks of all three", "cpu_networks_zen3", three),
        ("EPYC (Zen 3), 2 threads, left out, networks of all three", "cpu_networks_zen3_left_out", three),
        ("EPYC (Zen 3), 2 threads, with data of it, networks of all three", "cpu_networks_zen3_known", three),
    ):  # fmt: skip
        times = {network: own for network, own in medians(name).items() if kept is None or network in kept}
        ratios = {network: min(own[peer] for peer in own if peer != "tilewright") / own["tilewright"] for network, own in times.items()}
        least = min(ratios, key=lambda network: ratios[network])
        rows.append([what, str(len(ratios)), f"{statistics.geometric_mean(ratios.values()):.2f}", f"{ratios[least]:.2f} ({least})"])
    return rows


def attention_native() -> Rows:
    """Attention on a CPU: the first candidate of the models, the best of those measured, the plan without attention, PyTorch."""
    return _attention("attention_native")


def attention_bf16_native() -> Rows:
    """The same in bfloat16, with tile registers."""
    return [[cell for place, cell in enumerate(row) if place != 2] for row in _attention("attention_bf16_native")]


def _attention(file: str) -> Rows:
    rows = [["shape", "first choice, ms", "best of three", "regions apart", "PyTorch", "PyTorch / first choice"]]
    for name in dict.fromkeys(entry["network"] for entry in results_of(file)):
        measured = {e["contender"]: e["median_seconds"] for e in results_of(file) if e["network"] == name}
        own = [e["median_seconds"] for e in results_of(file) if e["network"] == name and "predicted_seconds" in e]
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
    header = "chains, threads, number, merged, their gain, of these slower by 3 %, not merged but 3 % faster, sign right %"
    rows = [[*header.split(", "), "measured twice the same %", "beyond 3 %: number, sign right %", "rank correlation"]]
    for name, text in (("chains_sealed", "random"), ("chains", "of networks")):
        for threads in (1, 2):
            said = summary(results_of(f"{name}_{threads}"))
            found = [(e["taken"], e["seconds"]["separate"] / e["seconds"]["merged"]) for e in results_of(f"{name}_{threads}") if "seconds" in e]
            lost, missed = sum(taken and gain < 0.97 for taken, gain in found), sum(not taken and gain > 1.03 for taken, gain in found)
            cells = (str(said["chains"]), str(said["taken"]), f"{said['gain of taken']:.2f}", str(lost), str(missed))
            clear = f"{said['beyond noise']}, {percent(said['sign right beyond noise'], 0)}"
            signs = (percent(said["sign right"], 0), percent(said["sign repeated"], 0), clear)
            rows.append([text, str(threads), *cells, *signs, f"{said['rank correlation']:.2f}"])
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


def chain_limits() -> Rows:
    """The most that chains could save of networks by prediction."""
    rows = [["network", "threads", "predicted without chains, ms", "most that chains could save, ms", "%"]]
    for entry in results_of("fusion_limit"):
        total, saved = entry["predicted_seconds"], entry["most_saved_seconds"]
        rows.append([entry["network"], str(entry["threads"]), f"{1e3 * total:.2f}", f"{1e3 * saved:.2f}", percent(saved / total)])
    return rows


def half_networks() -> Rows:
    """Networks in float16 and bfloat16 on a CPU with AMX, each in a file of its own."""
    return _half(path.stem for path in sorted(RESULTS.glob("half_*_[12].json")))


def half_pairs() -> Rows:
    """The same in bfloat16 on a CPU with AVX512_BF16 and without AMX."""
    return _half(["half_bfloat16_zen4"])


def _half(files: Iterable[str]) -> Rows:
    """Milliseconds, and the fastest other's time over ours."""
    others = {"eager": "eager", "eager_cl": "eager, channels last", "inductor": "Inductor"}
    rows = [["network, type", "threads", "ours, ms", *others.values(), "fastest other / ours"]]
    for file in files:
        seconds: dict[str, dict[str, float]] = {}
        for entry in results_of(file):
            if entry.get("median_seconds") is not None:
                seconds.setdefault(entry["network"], {})[entry["contender"]] = entry["median_seconds"]
        for network, own in seconds.items():
            times = [own.get(name) for name in others]
            cells = ("" if time is None else f"{1e3 * time:.3g}" for time in (own["tilewright"], *times))
            ratio = min(time for time in times if time is not None) / own["tilewright"]
            rows.append([network, str(results_of(file, "settings")["threads"]), *cells, f"{ratio:.2f}"])
    return rows


def first_day() -> Rows:
    """Models of transformers and timm through `torch.compile` on a CPU with AVX-512."""
    return _first_day("first_day_zen4")


def first_day_avx512() -> Rows:
    """The same on another such CPU, at an earlier commit."""
    return _first_day("first_day_1", "first_day_2")


def _first_day(*files: str) -> Rows:
    """The time of eager PyTorch and of the faster of Inductor's two settings over ours, and how soon each batch size was ready."""
    peers = {"eager": ("eager",), "Inductor": ("inductor", "inductor, frozen")}
    results = [entry for file in files for entry in results_of(file)]
    batches = sorted({entry["batch"] for entry in results})
    header = [f"{peer} / ours, batch {batch}" for peer in peers for batch in batches]
    dynamo = " (Dynamo by itself)" if any("captured_seconds" in entry for entry in results) else ""
    rows = [["model", *header, *(f"batch {batch} ready{dynamo}, s" for batch in batches)]]
    found = {peer: faster(results, contenders) for peer, contenders in peers.items()}
    for network in dict.fromkeys(entry["network"] for entry in results):
        own = [entry for entry in results if (entry["network"], entry["contender"]) == (network, "tilewright")]
        cells = (f"{found[peer][network, batch]:.2f}" for peer in peers for batch in batches)
        captured = (f" ({max(entry['captured_seconds'], 0.0):.1f})" if dynamo else "" for entry in own)
        rows.append([network, *cells, *(f"{entry['ready_seconds']:.1f}{alone}" for entry, alone in zip(own, captured, strict=True))])
    means = (math.exp(statistics.mean(math.log(v) for (_, b), v in found[peer].items() if b == batch)) for peer in peers for batch in batches)
    rows.append(["**geometric mean**", *(f"{value:.2f}" for value in means), *("" for _ in batches)])
    return rows


def compile_times() -> Rows:
    """Seconds to compile for the CPU itself, of which data exist, and for machines that are not there or have no data of their own, on two cores."""
    rows = [["network", "target", "empty cache, s", "times the CPU itself", "besides PyTorch's export, s", "full cache, besides export, s"]]
    for name in ("compile_time_targets", "compile_time_avx2"):
        entries = results_of(name)
        own = {entry["network"]: entry["cold"]["compile"] for entry in entries if entry["target"] == "native"}
        for entry in entries:
            cold, warm = entry["cold"], entry["warm"]
            seconds = (cold["compile_besides_export"], warm["compile_besides_export"])
            times = f"{cold['compile'] / own[entry['network']]:.2f}"
            rows.append([entry["network"], entry["target"], f"{cold['compile']:.1f}", times, *(f"{value:.1f}" for value in seconds)])
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


def executed_instructions() -> Rows:
    """Instructions of CPU kernels, read from their code, against those that are counted when it runs."""
    by = {"neoverse-n1": "QEMU, `tests/qemu_counts.c`", "cortex-a53": "QEMU", "x86-avx2": "cachegrind"}
    kinds = {"fma": "fma", "loads": "load", "stores": "store"}
    rows = [["target", "counted by", "FMA, load, store exact", "without data-dependent branches: all exact", "total within 2 %"]]
    for target, counter in by.items():
        found = [entry for entry in results_of("instruction_counts") if entry["target"] == target]
        decided = [entry for entry in found if not entry["predicted"]["undecided"]]
        pairs = [[(entry["predicted"][ours], entry["counted"].get(theirs)) for ours, theirs in kinds.items()] for entry in found]
        counted = all(count is not None for pair in pairs for _, count in pair)
        equal = f"{sum(all(ours == count for ours, count in pair) for pair in pairs)} of {len(pairs)}" if counted else "not counted"
        exact = f"{sum(entry['exact'] for entry in decided)} of {len(decided)}"
        near = sum(abs(entry["error_of_total"]) <= 0.02 for entry in found)
        rows.append([target, counter, equal, exact, f"{near} of {len(found)}"])
    return rows


def library_kernels() -> Rows:
    """Networks on a CPU without and with library kernels as candidates: milliseconds, with half the range between quartiles."""
    says = {
        "resnet18": "ResNet-18", "mobilenet_v2": "MobileNetV2 (Xeon)", "bert_base": "BERT, 128 tokens",
        "filter7": "16 to 16 channels of 56 x 56, 7 x 7 filters", "filter11": "the same, 11 x 11", "filter15": "the same, 15 x 15",
        "filter31": "the same, 31 x 31",
    }  # fmt: skip
    entries = [entry for name in ("resnet18", "mobilenet_v2", "bert_base", "filters") for entry in results_of(f"vendor_{name}")]

    def cell(timed: Mapping[str, Any]) -> str:
        least, most = timed["quartile_seconds"]
        median = milliseconds(timed["median_seconds"])
        digits = len(median.partition(".")[2])
        return f"{median} ± {1e3 * (most - least) / 2:.{digits}f}"

    rows = [["", "without", "with library kernels", "PyTorch, best layout", "regions of libraries, of those measured both ways"]]
    for network, name in says.items():
        own = [entry for entry in entries if entry["network"] == network]
        timed = {entry["contender"]: entry for entry in own if "contender" in entry}
        peers = (entry for name in ("eager", "eager_cl") if (entry := timed.get(name)) and entry["median_seconds"] is not None)
        peer = min(peers, key=lambda entry: entry["median_seconds"])
        (counts,) = (entry for entry in own if "computed by libraries" in entry)
        both = sum("library_seconds" in entry for entry in own)
        rows.append([name, *map(cell, (timed["without"], timed["with"], peer)), f"{counts['computed by libraries']} of {both}"])
    return rows


def onnx_cases() -> Rows:
    """ONNX's node tests: what computes them."""
    says = {"our kernels": "wholly by our kernels", "partly others": "partly", "refused": "refused", "wrong": "wrong"}
    found = results_of("onnx_node_tests")
    counted = sum(entry["counted"] for entry in found)
    rows = [["computed", "cases counted", "share", "others", "counted cases, by operator"]]
    for outcome, words in says.items():
        here = [entry for entry in found if entry["outcome"] == outcome]
        cases = [entry for entry in here if entry["counted"]]
        names = [name for entry in cases for name in (entry["detail"].split(", ") if outcome == "partly others" else entry["operators"][:1])]
        listed = ", ".join(f"{name} {count}" for name, count in sorted(Counter(names).items())) if outcome != "our kernels" else ""
        rows.append([words, str(len(cases)), f"{percent(len(cases) / counted)} %", str(len(here) - len(cases)), listed or "–"])
    return rows


def generation() -> Rows:
    """Steps of text generation, from the tenth on, against eager PyTorch."""
    rows = [["loop", "eager, ms a step", "Tilewright, ms a step", "times faster", "at the slowest step", "longest step, ms"]]
    for entry in results_of("generation"):
        times = (entry[key] for key in ("eager_ms", "tilewright_ms", "speed_up", "least_speed_up_of_a_step", "longest_step_ms"))
        rows.append([entry["loop"], *(f"{value:.3g}" for value in times)])
    return rows


CPU_TABLES = (
    generation,
    outliers,
    outliers_of_large_filters,
    large_filters,
    large_filters_on_a_gpu,
    long_filters,
    winograd_errors,
    code_scores,
    learned_on_cpus,
    learned_on_random_problems,
    calibrated_choices,
    networks,
    speed_ups,
    attention_native,
    attention_bf16_native,
    recurrent,
    chains,
    chain_decisions,
    chained_networks,
    chain_limits,
    half_networks,
    half_pairs,
    first_day,
    first_day_avx512,
    compile_times,
    onnx_cases,
    simulated_misses,
    scheduled_loops,
    executed_instructions,
    library_kernels,
)
