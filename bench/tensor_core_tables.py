"""Tables of the documentation about tensor cores of GPUs: each function returns rows of cells, the header first."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cells import Rows, results_of
from tilewright.hardware import identified_machine
from tilewright.runtime.prefetching import SHARE_AHEAD, SHARE_OF_NODE

TENSOR_TYPES = ("float16", "tf32")
TENSOR_BATCHES = (1, 8, 64)


def means_and_least(ratios: Iterable[Sequence[float]]) -> list[str]:
    """The last row of a table whose columns have these ratios."""
    return ["**geometric mean** (least)", *(f"{statistics.geometric_mean(own):.2f} ({min(own):.2f})" for own in ratios)]


def tensor_networks() -> Rows:
    """Networks in 16 bits and TF32 on a GPU: ours, and the fastest peer's time over it, by type and batch."""
    measured = [entry for dtype in TENSOR_TYPES for part in (1, 2) for entry in results_of(f"gpu_half_figure_{dtype}_h100_{part}")]
    return tensor_rows(measured, [(dtype, batch) for dtype in TENSOR_TYPES for batch in TENSOR_BATCHES])


def tensor_heavy() -> Rows:
    """As `tensor_networks`, those of most work, after the models were trained with layers of as much."""
    measured = [entry for dtype in TENSOR_TYPES for entry in results_of(f"gpu_half_heavy_{dtype}_h100")]
    return tensor_rows(measured, [(dtype, 64) for dtype in TENSOR_TYPES])


def tensor_h200() -> Rows:
    """As `tensor_networks`, on an H200, after the models were trained with more layers, with chains in 16 bits, and with values rounded to TF32."""
    parts = {"float16": ("1", "2", "8", "64", "64_2", "64_4"), "tf32": ("1", "2", "8", "64", "64_2", "64_3", "64_4")}
    measured = [entry for dtype, names in parts.items() for name in names for entry in results_of(f"gpu_half_figure_{dtype}_h200_{name}")]
    known = {entry["network"] for entry in measured}
    # float16 of networks that these did not reach
    earlier = ("gpu_half_single_float16_h200_3", "gpu_half_float16_h200_64_1", "gpu_half_float16_h200_64_2", "gpu_half_float16_h200_64_3")
    measured += [entry for name in earlier for entry in results_of(name) if entry["network"] not in known]
    return tensor_rows(measured, [(dtype, batch) for dtype in TENSOR_TYPES for batch in TENSOR_BATCHES])


Measured = tuple[float, float]
"""Microseconds, and the error relative to the largest result."""
PAIR_FILES = ("gpu_tensor_layers_pairs_h200_64",)
HALF_PAIR_FILES = ("gpu_tensor_layers_half_pairs_h200_64", "gpu_tensor_layers_half_pairs_h200_64_3")
FLOAT32_SCHEMAS = ("contraction", "direct", "winograd", "winograd fused")


@dataclass(frozen=True)
class PairsRun:
    """A layer or network as pairs, in our float32 and in PyTorch's, measured in turns."""

    pairs: Measured
    own: Measured
    peer: Measured

    @property
    def gain(self) -> float:
        return self.own[0] / self.pairs[0]


def tensor_pairs() -> Rows:
    """Float32 as pairs of TF32 and of float16 at 64 images: layers, then networks, beside our own float32 and PyTorch's, with errors. Gains are over
    our float32 of the same run."""
    kinds = "pairs of TF32", "pairs of float16"
    head = ["", *(f"{kind}, us; our float32 / these" for kind in kinds), "PyTorch's float32 / pairs of float16"]
    tf32, float16 = _pair_layers(*PAIR_FILES), _pair_layers(*HALF_PAIR_FILES)
    means = (f"{statistics.geometric_mean(run.gain for run in runs.values()):.2f}" for runs in (tf32, float16))
    networks: dict[str, dict[str, Measured]] = {}
    for entry in results_of("gpu_fp32_tensor_h200_3"):
        networks.setdefault(entry["network"], {})[entry["contender"]] = 1e6 * entry["median_seconds"], entry["relative_error"]
    peers = {name: min(found["eager"], found["eager_cl"]) for name, found in networks.items()}
    return [
        [*head, "error of our float32", *(f"of {kind}" for kind in kinds), "of PyTorch's float32"],
        *(_pairs_row(name, tf32.get(name), run) for name, run in float16.items()),
        ["**geometric mean** of the layers", *means, *[""] * 5],
        *(
            _pairs_row(name, *(PairsRun(found[way], found["tilewright"], peers[name]) for way in ("tensor", "tensor16")))
            for name, found in networks.items()
        ),
    ]


def _pair_layers(*files: str) -> dict[str, PairsRun]:
    """Our choice of pairs, the fastest of our float32 schemas measured beside it, and cuDNN's faster layout, of each layer."""
    runs: dict[str, PairsRun] = {}
    for entry in (entry for file in files for entry in results_of(file)):
        found = {one["contender"]: (one["median_us"], one["relative_error"]) for one in entry["contenders"]}
        own = [found[name] for name in found if name.removeprefix("ours, best ") in FLOAT32_SCHEMAS]
        peers = [pair for name, pair in found.items() if name.startswith("cudnn")]
        runs[entry["layer"]] = PairsRun(found["ours"], min(own), min(peers))
    return runs


def _pairs_row(name: str, tf32: PairsRun | None, float16: PairsRun) -> list[str]:
    """Times and gains of both kinds of pairs, and the errors."""
    times = (f"{run.pairs[0]:.1f}; {run.gain:.2f}" if run else "" for run in (tf32, float16))
    errors = (float16.own, tf32 and tf32.pairs, float16.pairs, float16.peer)
    return [name, *times, f"{float16.peer[0] / float16.pairs[0]:.2f}", *(f"{one[1]:.1e}" if one else "" for one in errors)]


def by_contender(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By network and contender: the microseconds of those that were timed, of the last entry if there are several."""
    found: dict[str, dict[str, float]] = {}
    for entry in entries:
        if entry["median_seconds"]:
            found.setdefault(entry["network"], {})[entry["contender"]] = 1e6 * entry["median_seconds"]
    return found


def listed_operators() -> Rows:
    """Operators that were once slower than PyTorch's in float32 on a GPU."""
    rows = [["operator", "ours, us", "PyTorch's faster layout, us", "PyTorch / ours", "Inductor / ours"]]
    for label, times in by_contender(later("gpu_listed_h100", "gpu_listed_heavy_h100")).items():
        own, eager = times["tilewright"], min(times[peer] for peer in ("eager", "eager_cl") if peer in times)
        rows.append(
            [label.split()[0], f"{own:.1f}", f"{eager:.1f}", f"{eager / own:.2f}", f"{times['inductor'] / own:.2f}" if "inductor" in times else "–"]
        )
    return rows


def later(*files: str) -> Iterator[Mapping[str, Any]]:
    """The comparisons of files, but of those that several have the rows of the last alone."""
    last = {entry["network"]: file for file in files for entry in results_of(file)}
    return (entry for file in files for entry in results_of(file) if last[entry["network"]] == file)


def tensor_rows(measured: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, int]]) -> Rows:
    """A row for each network of the comparisons, with a column for each type and batch."""
    found = {(entry["network"], entry["contender"]): entry["median_seconds"] for entry in measured}
    names = list(dict.fromkeys(entry["network"].split()[0] for entry in measured))
    cells: dict[str, list[str]] = {name: [] for name in names}
    ratios: list[list[float]] = []
    for dtype, batch in columns:
        ratios.append([])
        for name in names:
            network = f"{name} {dtype} x{batch}"
            times = {peer: found.get((network, peer)) for peer in ("tilewright", "eager", "eager_cl", "inductor")}
            own, peers = times.pop("tilewright"), [seconds for seconds in times.values() if seconds]
            if own and peers:
                ratios[-1].append(min(peers) / own)
                cells[name].append(f"{1e6 * own:.0f}; {ratios[-1][-1]:.2f}")
            else:
                cells[name].append("")
    head = ["network", *(f"{dtype}, batch {batch}: ours, us; fastest peer / ours" for dtype, batch in columns)]
    return [head, *([name, *own] for name, own in cells.items()), means_and_least(ratios)]


def tensor_layers() -> Rows:
    """The benchmark layers in float16 and TF32 on a GPU: our first choice, and the time of the faster of cuDNN's layouts over it."""
    files = ("fp16_h200", "fp16_h200_64_3", "tf32_h200_1", "tf32_h200_64")
    measured = [row for name in files for row in results_of(f"gpu_tensor_layers_{name}")]
    times = {(row["layer"], row["precision"], row["batch"]): {c["contender"]: c["median_us"] for c in row["contenders"]} for row in measured}
    columns = [(dtype, batch) for dtype in ("fp16", "tf32") for batch in (1, 64)]
    rows = [["layer", *(f"{dtype}, batch {batch}: ours, us; cuDNN / ours" for dtype, batch in columns)]]
    ratios: dict[tuple[str, int], list[float]] = {column: [] for column in columns}
    late: dict[tuple[str, int], list[float]] = {column: [] for column in columns}
    for layer in dict.fromkeys(layer for layer, _, _ in times):
        cells = []
        for column in columns:
            own = times.get((layer, *column))
            if own is None:
                cells.append("")
                continue
            peer = min(seconds for name, seconds in own.items() if name.startswith("cudnn"))
            ratios[column].append(peer / own["ours"])
            late[column].append(peer / own["ours, late"])
            cells.append(f"{own['ours']:.1f}; {ratios[column][-1]:.2f}")
        rows.append([layer, *cells])
    rows.append(means_and_least(ratios.values()))
    rows.append(["the same if no kernel begins early", *means_and_least(late.values())[1:]])
    return rows


def tensor_attention() -> Rows:
    """Attention in float16 on a GPU: the first choice of the models, PyTorch's FlashAttention, and the fastest of PyTorch's, over it."""
    rows = [["attention", "ours, us", "FlashAttention, us; / ours", "PyTorch's fastest, us; / ours"]]
    for name, times in by_contender(results_of("attention_fp16_h200_2")).items():
        own = next(seconds for contender, seconds in times.items() if contender.startswith("tensor attention"))
        flash, best = times.get("torch flash"), min(seconds for contender, seconds in times.items() if contender.startswith("torch"))
        rows.append([name, f"{own:.1f}", *("–" if peer is None else f"{peer:.1f}; {peer / own:.2f}" for peer in (flash, best))])
    return rows


def precisions() -> Rows:
    """Float32 modules with `precision="fp16"` against 16 bits in all regions, TF32, float32, and PyTorch's autocast."""
    others = {"everywhere": "16 bits everywhere", "tf32": "TF32", "fp32": "float32", "autocast": "autocast"}
    rows = [["module", "batch", "ours, us", *(f"{label} / ours" for label in others.values())]]
    files = "gpu_precision_h100", "gpu_precision_recurrent_h100"  # the later file has recurrent layers of the first again
    found = by_contender(entry for file in files for entry in results_of(file))
    ratios = [[times[other] / times["tilewright"] for other in others] for times in found.values()]
    for (label, times), row in zip(found.items(), ratios, strict=True):
        name, _, batch = label.rsplit(" ", 2)
        rows.append([name.removeprefix("torchvision:"), batch[1:], f"{times['tilewright']:.1f}", *(f"{ratio:.2f}" for ratio in row)])
    means = (f"{statistics.geometric_mean(column):.2f}" for column in zip(*ratios, strict=True))
    return [*rows, ["**geometric mean**", "", "", *means]]


def half_fusion() -> Rows:
    """Networks in float16 by what is fused: nothing, in registers, and in shared memory too as far as that is predicted to gain."""
    rows = [["network", "batch", "nothing fused, us", "in registers, us", "chains too, us", "nothing / registers", "registers / chains"]]
    found = by_contender(results_of("gpu_half_fusion_h100"))
    for label in sorted(found, key=lambda label: (label.split()[0], int(label.split("x")[-1]))):
        name, _, batch = label.split()
        none, own, chains = (found[label][way] for way in ("none", "tilewright", "chains"))
        rows.append([name, batch[1:], f"{none:.0f}", f"{own:.0f}", f"{chains:.0f}", f"{none / own:.2f}", f"{own / chains:.2f}"])
    return rows


def half_recurrent() -> Rows:
    """Recurrent networks in float16 against eager PyTorch, whose layers are cuDNN's."""
    rows = [["network", "batch", "ours, ms", "eager, ms", "eager / ours"]]
    for name, batch, own, eager in both("gpu_half_recurrent_h100", "eager"):
        rows.append([name, batch, f"{own / 1e3:.2f}", f"{eager / 1e3:.2f}", f"{eager / own:.2f}"])
    return rows


def pooled_convolutions() -> Rows:
    """What convolutions that pool their results in registers gain on tensor cores."""
    rows = [["network", "batch", "pooled by kernels of their own, us", "in the convolution's, us", "ratio"]]
    for name, batch, own, apart in both("gpu_half_pooled_h100", "unpooled"):
        rows.append([name, batch, f"{apart:.0f}", f"{own:.0f}", f"{apart / own:.2f}"])
    return rows


def tensor_vectors() -> Rows:
    """Products of a vector and a matrix that comes from memory, while level 2 holds other data that were only read."""
    rows = [["matrix", "type", "ours, us", "cuBLAS, us", "cuBLAS / ours", "bytes of the matrix / time, TB/s", "% of the data sheet's"]]
    most = identified_machine("h100").memory_bandwidth
    for network, times in by_contender(results_of("gpu_half_vectors_h100")).items():
        name, dtype, _ = network.split()
        own, peer = times["tilewright"], times["eager"]
        outputs = int(name.removeprefix("vector_"))
        rate = 4096 * outputs * (4 if dtype == "tf32" else 2) / (own / 1e6)
        cells = f"{own:.1f}", f"{peer:.1f}", f"{peer / own:.2f}", f"{rate / 1e12:.2f}", f"{100 * rate / most:.0f}"
        rows.append([f"4096 x {outputs}", dtype, *cells])
    return rows


def computed_maps() -> Rows:
    """What contractions that compute maps gain on tensor cores, against plans that store all maps."""
    rows = [["network", "batch", "all maps stored, us", "ours, us", "stored / ours"]]
    for name, batch, own, stored in both("gpu_prologues_h100", "stored"):
        rows.append([name, batch, f"{stored:.0f}", f"{own:.0f}", f"{stored / own:.2f}"])
    return rows


def prefetched_constants() -> Rows:
    """What networks in float16 gain if constants are brought to level 2 ahead of the kernels that read them."""
    rows = [["network", "batch", "not ahead, us", "ahead, us", "ratio"]]
    shares = f"{SHARE_AHEAD}:{SHARE_OF_NODE}"
    for file in ("gpu_prefetch_shares_h100", "gpu_prefetch_h100"):
        for label, times in by_contender(results_of(file)).items():
            name, _, batch = label.split()
            without, own = times["none"], times[shares]
            rows.append([name, batch[1:], f"{without:.0f}", f"{own:.0f}", f"{without / own:.2f}"])
    return rows


def both(file: str, contender: str) -> Iterator[tuple[str, str, float, float]]:
    """Network and batch of each comparison of `bench.gpu_half`, with the microseconds of ours and of another contender."""
    for label, times in by_contender(results_of(file)).items():
        if "tilewright" in times:
            network, _, batch = label.split()
            yield network, batch[1:], times["tilewright"], times[contender]


def tensor_products() -> Rows:
    """Matrix products on tensor cores of a GPU: ours, and cuBLAS's time over it, by type and batch."""
    found = by_contender(results_of("gpu_half_products_h200_2"))
    columns = [(dtype, batch) for dtype in ("float16", "bfloat16", "tf32") for batch in (1, 64)]
    rows = [["product", *(f"{dtype}, batch {batch}: ours, us; cuBLAS / ours" for dtype, batch in columns)]]
    ratios: list[list[float]] = [[] for _ in columns]
    for name in dict.fromkeys(network.split()[0] for network in found):
        cells = []
        for own_ratios, (dtype, batch) in zip(ratios, columns, strict=True):
            own, peer = (found[f"{name} {dtype} x{batch}"][contender] for contender in ("tilewright", "eager"))
            own_ratios.append(peer / own)
            cells.append(f"{own:.1f}; {peer / own:.2f}")
        rows.append([name, *cells])
    rows.append(means_and_least(ratios))
    return rows


TENSOR_CORE_TABLES = (
    tensor_networks,
    tensor_heavy,
    tensor_h200,
    tensor_pairs,
    listed_operators,
    tensor_layers,
    tensor_attention,
    computed_maps,
    prefetched_constants,
    pooled_convolutions,
    precisions,
    half_fusion,
    half_recurrent,
    tensor_products,
    tensor_vectors,
)
