"""Other ways of running a module, for comparison with Tilewright: PyTorch eager, Inductor, ONNX Runtime, OpenVINO.

Each function prepares one contender: it takes the module, which it may change, and example inputs, and returns a
callable of the inputs.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.tuning.measure import Contender, Run, Unavailable
from tilewright.tuning.onnx_module import OnnxModule


def with_pytorch(prepare: Callable[[nn.Module, tuple[Tensor, ...]], Run]) -> Callable[[nn.Module, tuple[Tensor, ...]], Run]:
    """The function that prepares a contender that runs a PyTorch module; Unavailable for an ONNX file."""

    def prepared(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        if isinstance(module, OnnxModule):
            raise Unavailable("an ONNX file holds no PyTorch module; give the module that it was made from")
        return prepare(module, inputs)

    return prepared


def optional_module(name: str) -> Any:
    """The imported package; raises Unavailable if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"the package {name} is not installed") from error


def eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Eager PyTorch in the default layout."""
    return torch.inference_mode()(module)


def eager_bfloat16(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """PyTorch under `torch.autocast(bfloat16)`, with channels-last images; results are float32."""
    layout = torch.channels_last if any(x.ndim == 4 for x in inputs) else torch.contiguous_format
    module = module.to(memory_format=layout)  # type: ignore[call-overload]

    @torch.inference_mode()
    def run(*values: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = module(*(x.contiguous(memory_format=layout) if x.ndim == 4 else x for x in values))
        return torch.utils._pytree.tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x, result)

    return run


def eager_channels_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """PyTorch with weights and images in channels-last layout; the conversion of the input is timed."""
    ranks = {x.ndim for x in inputs} & {4, 5}
    if not ranks:
        raise Unavailable("no input has a channels-last layout")
    layout = torch.channels_last if ranks == {4} else torch.channels_last_3d
    module = module.to(memory_format=layout)  # type: ignore[call-overload]

    @torch.inference_mode()
    def run(*values: Tensor) -> Any:
        return module(*(x.contiguous(memory_format=layout) if x.ndim in ranks else x for x in values))

    return run


def inductor(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """torch.compile with frozen (folded and prepacked) weights."""
    torch._dynamo.reset()
    compiled = torch.compile(module, options={"freezing": True})
    return torch.no_grad()(compiled)


def export_onnx(module: nn.Module, inputs: tuple[Tensor, ...], folder: str) -> Path:
    """Writes the module as an ONNX file with weights beside it, unless it is one."""
    if isinstance(module, OnnxModule):
        return module.path
    optional_module("onnxscript")
    path = Path(folder) / "network.onnx"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
        assert program is not None
        program.save(path, external_data=True)
    return path


def onnxruntime(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """ONNX Runtime's CPU provider with all graph optimisations."""
    runtime = optional_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads spin during a call but not after it, when the cores belong to the next contender.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(module, inputs, folder)
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda *values: session.run(None, {name: x.numpy() for name, x in zip(names, values, strict=True)})


def openvino(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """OpenVINO's CPU plugin, float32 forced (its default may be bfloat16)."""
    return _openvino(module, inputs, {"INFERENCE_PRECISION_HINT": "f32"})


def openvino_default(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """OpenVINO's CPU plugin in its default precision: bfloat16 if the machine has instructions for it."""
    return _openvino(module, inputs, {})


def _openvino(module: nn.Module, inputs: tuple[Tensor, ...], hints: Mapping[str, str]) -> Run:
    library = optional_module("openvino")
    core = library.Core()
    settings = {
        **hints,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    with tempfile.TemporaryDirectory() as folder:
        compiled = core.compile_model(core.read_model(export_onnx(module, inputs, folder)), "CPU", settings)
    request = compiled.create_infer_request()

    def run(*values: Tensor) -> Any:
        result = request.infer([x.numpy() for x in values])
        return [result[port] for port in compiled.outputs]

    return run


ON_GPU = ("eager", "eager_cl", "inductor")


def on_device(contender: Contender, device: str) -> Contender:
    """The contender, or one that is unavailable on the device: ONNX Runtime and OpenVINO are measured only on the CPU."""
    if device == "cpu" or contender.name in ON_GPU:
        return contender

    def refuse(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        raise Unavailable(f"{contender.name} is measured on the CPU only")

    return Contender(contender.name, refuse)


PEERS: Mapping[str, Contender] = MappingProxyType(
    {
        contender.name: contender
        for contender in (
            Contender("eager", with_pytorch(eager)),
            Contender("eager_cl", with_pytorch(eager_channels_last)),
            Contender("eager_bf16", with_pytorch(eager_bfloat16)),
            Contender("inductor", with_pytorch(inductor)),
            Contender("onnxruntime", onnxruntime),
            Contender("openvino", openvino),
            Contender("openvino_default", openvino_default),
        )
    }
)
"""The contenders by name."""
