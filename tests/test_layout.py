"""The layout of the source tree: imports go one way, no pickle, the environment is read in one file, importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright

PACKAGE = Path(__file__).parent.parent / "tilewright"
ORDER = (
    "system", "ir", "hardware", "graph", "frontend", "schedule", "codegen", "toolchain", "analysis", "cost", "partition", "runtime", "report",
)  # fmt: skip
"""A folder imports from those before it and from itself."""
EVERYWHERE = ("errors", "files", "settings")
"""Files that import nothing of the folders, and that every folder may import."""
ABOVE = ("compile", "cli", "cli_artifact", "cli_batch", "cli_options", "cli_train", "cli_tune", "models", "dynamo", "zoo", "__main__")
"""What may import every folder, and what no folder may import."""
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def imported(path: Path) -> Iterator[str]:
    """Absolute names of everything that a module imports, also inside functions."""
    package = ("tilewright", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*start, *([node.module] if node.module else ())))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    """The folder, or the file's name where it lies in the package's root."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def wrong_imports(part: str, names: Iterator[str]) -> list[str]:
    """Those imports of a part of the package that the order forbids."""
    allowed = {*EVERYWHERE}
    if part in ORDER:
        allowed |= set(ORDER[: ORDER.index(part) + 1])
    elif part in ABOVE or part == "__init__":
        allowed |= {*ORDER, *ABOVE}
    used = {name.split(".")[1] for name in names if name.startswith("tilewright.")}
    folders = {child.stem for child in PACKAGE.iterdir()}
    return sorted(name for name in used & folders if name not in allowed)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    assert wrong_imports(part_of(path), imported(path)) == []


def test_the_rule_finds_what_it_forbids(tmp_path: Path) -> None:
    assert wrong_imports("ir", iter(["tilewright.graph.table", "torch", "tilewright.errors"])) == ["graph"]
    assert wrong_imports("runtime", iter(["tilewright.report.tables", "tilewright.cost.cpu"])) == ["report"]
    assert wrong_imports("report", iter(["tilewright.cli", "tilewright.compile.compile"])) == ["cli", "compile"]
    assert set(imported(PACKAGE / "partition" / "plan.py")) >= {"tilewright.ir.graph", "tilewright.ir.graph.Graph"}


def test_every_part_has_its_place() -> None:
    parts = {part_of(path) for path in MODULES}
    assert parts <= {*ORDER, *EVERYWHERE, *ABOVE, "__init__"}
    assert all((PACKAGE / folder / "__init__.py").is_file() for folder in ORDER)

PICKLING = frozenset(
    "torch.load torch.save torch.export.load torch.export.save torch.jit.load torch.package.PackageImporter torch.hub.load eval exec "
    "torch._inductor.aoti_load_package yaml.load".split()
)
"""What unpickles, or otherwise runs what a file says."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_pickle(path: Path) -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    assert not forbidden & {name.split(".")[0] for name in imported(path)}
    for node in ast.walk(ast.parse(path.read_text())):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        assert called not in PICKLING, called
        if called in ("np.load", "numpy.load"):
            assert "allow_pickle=False" in ast.unparse(node)
        imports = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        assert not {"load_pt2", "PT2ArchiveReader", "deserialize_torch_artifact"} & set(imports)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_environment_is_read_in_settings_only(path: Path) -> None:
    if path == PACKAGE / "settings.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in ("environ", "getenv", "environb"), f"line {getattr(node, 'lineno', 0)} reads the environment"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text and text.splitlines()[0].strip()


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_is_cheap() -> None:
    names = "tilewright, tilewright.zoo, tilewright.cli, tilewright.models, tilewright.hardware, tilewright.toolchain"
    assert run_python(f"import sys, {names}; print('torch' in sys.modules)").strip() == "False"


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
        _ = tilewright.nonsense  # type: ignore[attr-defined]
