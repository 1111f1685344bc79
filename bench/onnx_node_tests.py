"""ONNX's own tests of its operators: which of them our kernels compute wholly, which partly, and which models are refused.

    python -m bench.onnx_node_tests
    python -m bench.onnx_node_tests --only softmax,conv

Each case of `onnx.backend.test` is a model with inputs and expected results. All inputs are passed as inputs, also those for shapes or axes.
Counted are the cases of every operator of ONNX's default domain except those of `OUTSIDE`, whose tensors are of the types in `TYPES`; a case that
tests the function by which ONNX defines an operator ("..._expanded") counts as that operator's. The other cases are run and recorded too.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tilewright
from bench.common import write_results
from tilewright.errors import TilewrightError
from tilewright.frontend.imported import unsupported
from tilewright.graph import onnx_call
from tilewright.runtime.executable import Executable

OUTSIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "signal processing": ("BlackmanWindow", "DFT", "HammingWindow", "HannWindow", "MelWeightMatrix", "STFT"),
        "random numbers": ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
        "files and text": ("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
        "sequences and optional values": (
            "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
            "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence",
        ),
    }
)  # fmt: skip
"""Operators of ONNX's default domain that are no part of convolutional, recurrent or transformer networks."""
TYPES = frozenset("float32 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split())
OURS, PARTLY, REFUSED, WRONG = "our kernels", "partly others", "refused", "wrong"


@dataclass(frozen=True)
class Case:
    """One test. `operators`: those that it is about; `data`: pairs of inputs and expected outputs."""

    name: str
    model: onnx.ModelProto
    operators: tuple[str, ...]
    data: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]
    rtol: float
    atol: float

    @property
    def is_counted(self) -> bool:
        """Whether operators and types are in the scope of this benchmark."""
        outside = {name for names in OUTSIDE.values() for name in names}
        tensors = [value for pair in self.data for side in pair for value in side]
        typed = all(isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in TYPES for value in tensors)
        return typed and not any("." in name or name in outside for name in self.operators)


@dataclass(frozen=True)
class Run:
    """What became of a case: one of the four kinds; `detail` lists the operators that others run, or the reason."""

    kind: str
    detail: str = ""
    specialised: int = 0
    """Inputs whose values the program was compiled for."""


@functools.cache
def cases() -> Mapping[str, Case]:
    """All cases of the installed ONNX by name."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about overflow in the expected results
        loaded = {case.name: case for case in load_model_tests(kind="node")}
    result = {}
    for name, case in loaded.items():
        tested = loaded.get(name.partition("_expanded")[0], case)
        assert case.model is not None and tested.model is not None and case.data_sets is not None
        operators = tuple(dict.fromkeys(f"{node.domain}.{node.op_type}".lstrip(".") for node in tested.model.graph.node))
        data = tuple((tuple(map(_array, inputs)), tuple(map(_array, outputs))) for inputs, outputs in case.data_sets)
        result[name] = Case(name, case.model, operators, data, case.rtol, case.atol)
    return MappingProxyType(result)


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


Prepared = tuple[Callable[..., Any], Sequence[str], int]
"""The model as a function, the operators that others run, and the number of specialised inputs."""


def compiled(model: onnx.ModelProto, inputs: Sequence[torch.Tensor]) -> Prepared:
    executable = tilewright.compile(model, tuple(inputs), "native")
    return executable, others(executable), sum(not leaf.name for leaf in executable.signature.inputs)


def others(executable: Executable) -> list[str]:
    """Nodes that PyTorch or ONNX's runtimes compute, and operators whose regions PyTorch computes."""
    program, tail = executable.image.program, executable.signature.tail
    nodes = [node.target for node in unsupported(program.graph)]
    nodes += [onnx_call.PREFIX + name for name in onnx_call.operators_of(tail.model)] if tail is not None else []
    fallen = [name for region in program.regions if region.kind == "torch" for name in region.nodes if program.nodes[name].operator != "torch"]
    return sorted({*nodes, *fallen})


def run_case(case: Case, prepare: Callable[[onnx.ModelProto, Sequence[torch.Tensor]], Prepared] = compiled) -> Run:
    """What becomes of a case; results are compared with ONNX's within the case's own tolerances (float32's rounding where 0 is expected, two units
    of rounding of a 16-bit type, in which ONNX rounds every intermediate result), and shapes and types exactly."""
    detail: list[str] = []
    specialised = 0
    for given, wanted in case.data:
        try:
            inputs = [_tensor(np.array(value)) for value in given]
        except (TypeError, ValueError):
            return Run(REFUSED, "PyTorch has no such tensors")
        try:
            function, foreign, specialised = prepare(case.model, inputs)
            results = function(*inputs)
        except TilewrightError as error:
            return Run(REFUSED, str(error))
        except Exception as error:
            return Run(WRONG, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        results = results if isinstance(results, (tuple, list)) else (results,)
        difference = _difference(case, [_result(r) for r in results], [np.asarray(w) for w in wanted])
        if difference:
            return Run(WRONG, difference)
        detail += foreign
    return Run(PARTLY if detail else OURS, ", ".join(dict.fromkeys(detail)), specialised)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor; NumPy's bfloat16 is that of `ml_dtypes`."""
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else torch.from_numpy(array)


def _result(result: Any) -> np.ndarray:
    if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
        return result.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(result)


def _difference(case: Case, got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    if len(got) != len(wanted):
        return f"{len(got)} results, not {len(wanted)}"
    for a, b in zip(got, wanted, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        rtol = case.rtol
        if a.dtype in (ml_dtypes.bfloat16, np.float16):
            rtol = max(rtol, 2 * torch.finfo(torch.float16 if a.dtype == np.float16 else torch.bfloat16).eps)
            a, b = a.astype(np.float32), b.astype(np.float32)
        try:
            largest = float(np.abs(b[np.isfinite(b)]).max(initial=0)) if b.dtype.kind == "f" else 0.0
            np.testing.assert_allclose(a, b, rtol=rtol, atol=max(case.atol, 1e-6, 3e-6 * largest))
        except AssertionError as error:
            return " ".join(str(error).split())[:300]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXTS", help="only cases whose names contain one of these")
    parser.add_argument("--name", default="onnx_node_tests")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [case for case in cases().values() if any(text in case.name for text in options.only.split(","))]
    console = Console()
    results = []
    for case in track(chosen, "ONNX's cases", console=console):
        run = run_case(case)
        results.append({"case": case.name, "operators": case.operators, "counted": case.is_counted, "outcome": run.kind, "detail": run.detail,
                        "specialised": run.specialised})  # fmt: skip
    counts = Counter((result["counted"], result["outcome"]) for result in results)
    counted = sum(case.is_counted for case in chosen)
    table = Table("outcome", "cases counted", "share", "other cases")
    for kind in (OURS, PARTLY, REFUSED, WRONG):
        table.add_row(kind, str(counts[True, kind]), f"{counts[True, kind] / max(counted, 1):.1%}", str(counts[False, kind]))
    console.print(table)
    settings = {**vars(options), "types": sorted(TYPES), "outside": {group: list(names) for group, names in OUTSIDE.items()}}
    write_results(options.name, settings, results)


if __name__ == "__main__":
    main()
