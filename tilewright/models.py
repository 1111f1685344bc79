"""Models by name: the MODEL argument of the command line, and of `tilewright.compile`.

| text | model |
|---|---|
| ``FILE.onnx``, ``FILE.pt2`` | the file |
| ``zoo:NAME`` | a network of `tilewright.zoo`, random weights |
| ``torchvision:NAME``, ``timm:NAME`` | that library's network, random weights |
| ``package.module:callable`` | what the callable returns: a module and its example inputs; called with ``batch`` if it has such a parameter |
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import InvalidModel, TilewrightError, UnknownModel, UnsupportedOption
from tilewright.files import first_line

if TYPE_CHECKING:
    import torch

    from tilewright.frontend.sized import SizedModel

MOST_ELEMENTS = 1 << 40
"""Largest number of elements of an example input: more is a typing error."""
_SHAPES = "its inputs (--input, example_inputs)"
INPUT_PATTERN = re.compile(r"(\d+(?:x\d+)*|scalar)(?::(\w+))?(?:=(\S+))?")


@dataclass(frozen=True)
class Model:
    """A model to compile: `module` is an nn.Module in evaluation mode, an ExportedProgram or a path; `inputs(seed)` draws example inputs.
    `inputs` is None if the file describes the inputs."""

    name: str
    module: Any
    inputs: Callable[[int], tuple[Any, ...]] | None


def resolve(text: str, batch: int | None = None, inputs: Sequence[str] = ()) -> Model:
    """The model that a name or path denotes.

    `batch` is the first extent of every example input (default 1). `inputs` replaces the example inputs: one text per tensor, such as "1x3x224x224",
    "1x128:int64", or, with the values of all elements, "4:int64=1,3,224,224".

    Raises:
        UnknownModel: names the nearest models, or what to install.
        UnsupportedOption: for a batch if the model has fixed input shapes.
    """
    scheme, colon, name = text.partition(":")
    chosen = _drawn(inputs) if inputs else None
    if Path(text).suffix in (".onnx", ".pt2"):
        return _file(text, batch, chosen)
    if not colon:
        raise UnknownModel(f"{text!r} is no model", _nearest_anywhere(text))
    if scheme == "zoo":
        model = _zoo(text, name, batch or 1)
    elif scheme == "torchvision":
        model = _torchvision(text, name, batch or 1)
    elif scheme == "timm":
        model = _timm(text, name, batch or 1)
    else:
        model = _callable(text, scheme, name, batch, chosen is not None)
    return model if chosen is None else Model(model.name, model.module, chosen)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(known)[:40])}"


def _nearest_anywhere(text: str) -> str:
    from tilewright.zoo import NETWORKS

    near = [f"zoo:{name}" for name in difflib.get_close_matches(text.lower(), list(NETWORKS), n=3, cutoff=0.4)]
    start = f"did you mean {', '.join(near)}? " if near else ""
    return start + "a model is FILE.onnx, FILE.pt2, zoo:NAME, torchvision:NAME, timm:NAME, or package.module:callable"


def _drawn(texts: Sequence[str]) -> Callable[[int], tuple[Any, ...]]:
    """Tensors of the given shapes: with the given values, or random: normally distributed, or 0 and 1 for integers and booleans."""
    parts = []
    for text in texts:
        match = INPUT_PATTERN.fullmatch(text)
        if match is None:
            raise UnsupportedOption(f"input {text!r} is no shape", 'write it as "1x3x224x224", "1x128:int64", or with values "2:int64=5,7"')
        shape = () if match[1] == "scalar" else tuple(int(extent[-20:]) for extent in match[1].split("x"))
        if math.prod(shape) > MOST_ELEMENTS or max(map(len, match[1].split("x"))) > 20:
            raise UnsupportedOption(f"input {text[:80]!r} has more than {MOST_ELEMENTS} elements", "give a smaller one")
        parts.append((shape, match[2] or "float32", match[3]))

    def draw(seed: int) -> tuple[Any, ...]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        tensors = []
        for shape, name, values in parts:
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise UnsupportedOption(f"{name!r} is no dtype", "float32, float16, bfloat16, int64, int32, bool, ...")
            if values is not None:
                tensors.append(_with_values(shape, dtype, values))
                continue
            try:
                tensors.append(random_tensor(shape, dtype, generator))
            except (RuntimeError, TypeError) as error:
                raise UnsupportedOption(f"no random tensor {shape} of {name}: {first_line(error)}", "give a smaller one, or another dtype") from error
        return tuple(tensors)

    return draw


def _with_values(shape: tuple[int, ...], dtype: torch.dtype, text: str) -> torch.Tensor:
    import torch

    words = text.split(",")
    if len(words) != math.prod(shape):
        raise UnsupportedOption(f"an input of {math.prod(shape)} elements has {len(words)} values", "give one value for each element, in order")
    try:
        numbers = [float(word) if dtype.is_floating_point else int(word) for word in words]
        return torch.tensor(numbers, dtype=dtype).reshape(shape)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise UnsupportedOption(f"{text[:80]!r} are no values of {dtype}: {first_line(error)}", "separate numbers by commas") from error


def random_tensor(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed values; zeros and ones for integer and boolean dtypes, which are valid indices into almost every table."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), generator=generator, dtype=dtype if dtype.is_complex else None).to(dtype)
    return torch.randint(2, tuple(shape), generator=generator).to(dtype)


def _file(text: str, batch: int | None, chosen: Callable[[int], tuple[Any, ...]] | None) -> Model:
    path = Path(text)
    if path.exists() and not path.is_file():
        raise UnknownModel(f"{text} is no regular file", "give an .onnx or .pt2 file that stands on a disk")
    if not path.is_file():
        beside = [str(other) for other in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(text, beside, n=3, cutoff=0.4)
        raise UnknownModel(f"there is no file {text}", f"did you mean {', '.join(near)}?" if near else "check the path")
    if path.suffix == ".onnx":
        if batch is not None and chosen is None:
            from tilewright.frontend.sized import OnnxModel

            chosen = inputs_of(text, OnnxModel(path), batch)
        return Model(path.stem, str(path), chosen)
    from tilewright.frontend.symbolic import SymbolicProgram, is_free
    from tilewright.frontend.torch_export import load_exported

    program = load_exported(path)
    if is_free(program):
        return Model(path.stem, program, chosen or inputs_of(text, SymbolicProgram(program), batch))
    if batch is not None or chosen is not None:
        option = "--input" if batch is None else "a batch"
        cause = f"{option} is given, and the exported program has its own input shapes"
        raise UnsupportedOption(cause, "leave it out, or export it again with free sizes")
    return Model(path.stem, program, lambda seed: _arguments(program, seed))


def inputs_of(text: str, model: SizedModel, batch: int | None) -> Callable[[int], tuple[Any, ...]]:
    """Random inputs of a model called `text`, whose free first dimensions are `batch`. Raises UnsupportedOption if no dimension is that, or others
    are free."""
    if not model.names:
        raise UnsupportedOption(f"a batch is given, and {text} has its own input shapes", f"export it with this batch, or give {_SHAPES}")
    others = [name for name, dim in zip(model.names, model.dimensions, strict=True) if dim or batch is None]
    if others or batch is None:
        raise UnsupportedOption(f"the sizes {', '.join(others)} of {text} are free", f"give {_SHAPES}; a batch gives only first dimensions")

    def draw(seed: int) -> tuple[Any, ...]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        arguments, _ = model.example((batch,) * len(model.names))
        return tuple(random_tensor(x.shape, x.dtype, generator) if isinstance(x, torch.Tensor) else x for x in arguments)

    return draw


def _arguments(program: Any, seed: int) -> tuple[Any, ...]:
    """Random positional arguments of an exported program's shapes and dtypes; constants are those with which it was exported."""
    import torch
    from torch.utils import _pytree as pytree

    generator = torch.Generator().manual_seed(seed)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    leaves = []
    for spec in program.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            like = nodes[spec.arg.name].meta["val"]
            leaves.append(random_tensor(like.shape, like.dtype, generator) if isinstance(like, torch.Tensor) else like)
    arguments, _ = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return tuple(arguments)


def _like(examples: Sequence[Any]) -> Callable[[int], tuple[Any, ...]]:
    """Fresh random tensors of the examples' shapes and dtypes; integer tensors are returned unchanged, because their range is unknown."""

    def draw(seed: int) -> tuple[Any, ...]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        return tuple(random_tensor(x.shape, x.dtype, generator) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in examples)

    return draw


def _zoo(text: str, name: str, batch: int) -> Model:
    from tilewright import zoo

    module, _ = zoo.build(name, batch)

    def draw(seed: int) -> tuple[Any, ...]:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return zoo.NETWORKS[name].example_inputs(batch)

    return Model(text, module, draw)


def _package(name: str) -> Any:
    """The package. Raises UnknownModel if it is not installed, or cannot be imported for a reason of its own."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise UnknownModel(f"the package {name} is not installed", f"pip install {name}") from error
        raise UnknownModel(
            f"the package {name} is installed and fails when imported ({type(error).__name__}: {first_line(error)})", _mend(name, error)
        ) from error


def _mend(name: str, error: Exception) -> str:
    """The remedy for a package that fails when it is imported."""
    if "torchvision::" in str(error):
        import torch

        return (
            f"torchvision's compiled operators do not load with PyTorch {torch.__version__}: install the torchvision that was built for this release"
        )
    if isinstance(error, ModuleNotFoundError):
        return f"pip install {(error.name or name).partition('.')[0]}, which it needs"
    return f"check that `python -c 'import {name}'` works"


def _torchvision(text: str, name: str, batch: int) -> Model:
    models = _package("torchvision").models
    known = models.list_models()
    if name not in known:
        raise UnknownModel(f"torchvision has no model {name!r}", _nearest(name, known))
    return Model(text, _seeded(lambda: models.get_model(name, weights=None)).eval(), _images(batch, 3, 299 if name == "inception_v3" else 224))


def _timm(text: str, name: str, batch: int) -> Model:
    library = _package("timm")
    if not library.is_model(name):
        raise UnknownModel(f"timm has no model {name!r}", _nearest(name, library.list_models()))
    module = _seeded(lambda: library.create_model(name, pretrained=False)).eval()
    return Model(text, module, _images(batch, *module.pretrained_cfg["input_size"][:2]))


def _seeded(build: Callable[[], Any]) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def _images(batch: int, channels: int, extent: int) -> Callable[[int], tuple[Any, ...]]:
    return _drawn([f"{batch}x{channels}x{extent}x{extent}"])


def _callable(text: str, package: str, name: str, batch: int | None, has_inputs: bool) -> Model:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", package):
        raise UnknownModel(f"{text!r} is no model", _nearest_anywhere(text))
    try:
        module = importlib.import_module(package)
    except Exception as error:
        if not isinstance(error, ImportError):
            raise InvalidModel(f"{text!r}: importing {package} raised {type(error).__name__}: {first_line(error)}", _mend(package, error)) from error
        known = ("zoo", "torchvision", "timm")
        near = difflib.get_close_matches(package, known, n=1)
        missing = isinstance(error, ModuleNotFoundError) and error.name in (package, package.partition(".")[0])
        hint = f"did you mean {near[0]}:{name}?" if near else f"{package} is taken for a Python package: it must be installed or on PYTHONPATH"
        raise UnknownModel(
            f"{text!r}: the module {package} cannot be imported ({error})", hint if missing or near else _mend(package, error)
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownModel(f"{package} has no callable {name!r}", _nearest(name, public) if public else "check the name")
    try:
        accepts = "batch" in inspect.signature(function).parameters
    except ValueError:  # a function written in C has no signature
        accepts = False
    if batch is not None and not accepts:
        raise UnsupportedOption(f"a batch is given, and {text} has no parameter 'batch'", f"add one, or give {_SHAPES}")
    try:
        result = _seeded(lambda: function(batch=batch or 1) if accepts else function())
    except TilewrightError:
        raise
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise InvalidModel(f"{text} raised {type(error).__name__}: {first}", "it must return (module, inputs) without arguments") from error
    return _returned(text, result, has_inputs)


def _returned(text: str, result: Any, has_inputs: bool) -> Model:
    import torch

    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module):
        module, examples = result
        examples = (examples,) if isinstance(examples, torch.Tensor) else tuple(examples)
        return Model(text, module.eval(), _like(examples))
    if isinstance(result, torch.nn.Module) and has_inputs:
        return Model(text, result.eval(), None)
    if isinstance(result, torch.export.ExportedProgram):
        return Model(text, result, _like(result.example_inputs[0]) if result.example_inputs else None)
    kind = "a module without example inputs" if isinstance(result, torch.nn.Module) else type(result).__name__
    raise InvalidModel(f"{text} returned {kind}", "return (module, (input, ...)), or give the shapes with --input")


__all__ = ["Model", "inputs_of", "random_tensor", "resolve"]
