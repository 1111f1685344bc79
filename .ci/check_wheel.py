"""Checks an installed wheel: it is the one imported, every module of it imports, and no file of the package is missing.

python check_wheel.py SITE SOURCE_PACKAGE
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(site: str, source: str) -> None:
    import tilewright

    installed = Path(site) / "tilewright"
    assert Path(tilewright.__file__).parent == installed, f"{tilewright.__file__} was imported, not the wheel"
    wanted = {
        path.relative_to(source) for path in Path(source).rglob("*") if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    missing = sorted(str(path) for path in wanted if not (installed / path).exists())
    assert not missing, f"the wheel lacks {missing}"
    assert (installed / "py.typed").exists()
    names = sorted(".".join(("tilewright", *path.with_suffix("").parts)) for path in wanted if path.suffix == ".py")
    for name in names:
        importlib.import_module(name.removesuffix(".__init__"))
    print(f"the wheel holds all {len(wanted)} files of the package, and its {len(names)} modules import")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
