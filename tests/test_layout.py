"""The layout of the source tree: imports go one way, no pickle, the environment is read in one file, importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tilewright

PACKAGE = Path(__file__).parent.parent / "tilewright"
ORDER = (
    "system", "ir", "hardware", "graph", "frontend", "codegen", "toolchain", "runtime", "analysis", "kernels", "selection", "partition", "tuning", "report",
)  # fmt: skip
"""Folders in order: each imports only from those before it and from itself."""
EVERYWHERE = ("errors", "files", "settings", "stages", "text")
"""Files that import no folder and that every folder may import."""
ABOVE = ("compile", *(path.stem for path in PACKAGE.glob("cli*.py")), "models", "dynamo", "dynamo_sizes", "zoo", "__main__")
"""Modules that may import every folder, and that no folder may import."""
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a module's syntax tree; the module itself is the first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> Iterator[str]:
    """Absolute names of everything that a module imports, also inside functions."""
    package = ("tilewright", *path.relative_to(PACKAGE).parts[:-1])
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*start, *([node.module] if node.module else ())))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    """The folder of a file, or the file's name if it is in the package's root."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def wrong_imports(part: str, names: Iterator[str]) -> list[str]:
    """The imports of a part of the package that the order forbids."""
    allowed = {*EVERYWHERE}
    if part in ORDER:
        allowed |= set(ORDER[: ORDER.index(part) + 1])
    elif part in ABOVE or part == "__init__":
        allowed |= {*ORDER, *ABOVE}
    used = {name.split(".")[1] for name in names if name.startswith("tilewright.")}
    folders = {child.stem for child in PACKAGE.iterdir()}
    return sorted(name for name in used & folders if name not in allowed)


def test_imports_go_one_way() -> None:
    assert {path: wrong for path in MODULES if (wrong := wrong_imports(part_of(path), imported(path)))} == {}


def test_the_rule_finds_what_it_forbids(tmp_path: Path) -> None:
    assert wrong_imports("ir", iter(["tilewright.graph.table", "torch", "tilewright.errors"])) == ["graph"]
    assert wrong_imports("runtime", iter(["tilewright.report.tables", "tilewright.kernels.cpu.contraction.estimate"])) == ["kernels", "report"]
    assert wrong_imports("report", iter(["tilewright.cli", "tilewright.compile.compile"])) == ["cli", "compile"]
    assert set(imported(PACKAGE / "partition" / "plan.py")) >= {"tilewright.ir.graph", "tilewright.ir.graph.Graph"}


def test_codegen_knows_no_instruction() -> None:
    """Printers and interpreter use only the instructions' own descriptions."""
    assert [path.name for path in (PACKAGE / "codegen").glob("*.py") if any(".intrinsics" in name for name in imported(path))] == []


def test_every_part_has_its_place() -> None:
    parts = {part_of(path) for path in MODULES}
    assert parts <= {*ORDER, *EVERYWHERE, *ABOVE, "__init__"}
    assert all((PACKAGE / folder / "__init__.py").is_file() for folder in ORDER)


PICKLING = frozenset(
    "torch.load torch.save torch.export.load torch.export.save torch.jit.load torch.package.PackageImporter torch.hub.load eval exec "
    "torch._inductor.aoti_load_package yaml.load".split()
)
"""Functions that unpickle, or otherwise run code from a file."""


def unpickling(path: Path) -> Iterator[str]:
    """A module's imports and calls of such functions."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    yield from forbidden & {name.split(".")[0] for name in imported(path)}
    for node in nodes(path):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called in PICKLING or (called in ("np.load", "numpy.load") and "allow_pickle=False" not in ast.unparse(node)):
            yield called
        imports = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        yield from {"load_pt2", "PT2ArchiveReader", "deserialize_torch_artifact"} & set(imports)


def test_no_pickle() -> None:
    assert {path: found for path in MODULES if (found := list(unpickling(path)))} == {}
    wrong = PACKAGE / "wrong.py"  # does not exist
    text = "import numpy as np, torch, pickle\nfrom x import load_pt2\ntorch.load(p)\nnp.load(p)\nnp.load(p, allow_pickle=False)\neval(t)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "nodes", lambda path: tuple(ast.walk(ast.parse(text))))
        assert sorted(unpickling(wrong)) == ["eval", "load_pt2", "np.load", "pickle", "torch.load"]


def test_environment_is_read_in_settings_only() -> None:
    for path in MODULES:
        for node in nodes(path) if path != PACKAGE / "settings.py" else ():
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in ("environ", "getenv", "environb"), f"{path}:{getattr(node, 'lineno', 0)} reads the environment"


USERS_MACHINE = {"attention", "chains", "cpu_choice", "fusion", "gpu_regions", "large_filters", "tuning_kills", "vendor", "winograd_numerics"}
"""Benchmarks of this CPU or GPU as its user has calibrated it. Results of `chains` hold its facts, with which the constants of chains are fitted."""
OF_CATALOGUE_CPUS = {"cache_misses", "instruction_counts", "pipeline_check", "replay"}
"""Benchmarks that ask for CPUs of the catalogue, which nobody calibrates, and the comparison of two commits."""


def test_a_users_calibration_does_not_reach_what_the_package_is_made_from() -> None:
    """Constants and models of the package are fitted, and judged, with `identified_machine`."""
    tools = [path for path in (PACKAGE.parent / "bench").glob("*.py") if path.stem not in USERS_MACHINE | OF_CATALOGUE_CPUS]
    for path in (*tools, PACKAGE / "cli_train.py"):
        names = [
            alias.name for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.module == "tilewright.hardware" for alias in node.names
        ]
        assert not {"machine", "host_cpu"} & set(names), path


def test_every_module_says_what_it_is() -> None:
    for path in MODULES:
        module = nodes(path)[0]
        text = ast.get_docstring(module) if isinstance(module, ast.Module) else ""
        assert text and text.splitlines()[0].strip(), path


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_is_cheap() -> None:
    names = (
        "tilewright, tilewright.zoo, tilewright.cli, tilewright.models, tilewright.hardware, tilewright.toolchain, tilewright.tuning.compile_worker"
    )
    assert run_python(f"import sys, {names}; print('torch' in sys.modules)").strip() == "False"


def test_what_runs_programs_imports_nothing_that_plans_or_trains() -> None:
    modules = ", ".join(f"tilewright.runtime.{path.stem}" for path in sorted((PACKAGE / "runtime").glob("*.py")) if path.stem != "__init__")
    loaded = run_python(f"import sys, {modules}; print(*sys.modules)").split()
    assert "tilewright.runtime.artifact" in loaded
    planning = ("kernels", "selection", "partition", "tuning")
    assert [name for name in loaded if name.startswith(tuple(f"tilewright.{folder}" for folder in planning)) or name == "sklearn"] == []


def test_compile_is_the_function_however_it_is_imported() -> None:
    code = """
import tilewright
first = tilewright.compile
import tilewright.compile
from tilewright.compile import compile as inner
from tilewright import compile as outer
import tilewright.compile as direct
print(first is tilewright.compile is inner is outer is direct, callable(first))
"""
    assert run_python(code).split() == ["True", "True"]


def test_public_names() -> None:
    assert set(tilewright.__all__) <= set(dir(tilewright))
    assert all(getattr(tilewright, name) is not None for name in tilewright.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tilewright.nonsense
