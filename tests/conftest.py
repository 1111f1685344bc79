"""Options of the test suite; tests that need a GPU are skipped if there is none. A run has its own kernel cache, which its processes share."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.draws import THOROUGH, left_for_later
from tilewright.runtime.builds import wait_for_all

settings.register_profile(THOROUGH)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is printed into tests/golden")
    parser.addoption("--published-data", help="folder of CNNOpt's published measurements on a V100 (see bench/published_data.py)")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's processes inherit the variable
        folder = tempfile.mkdtemp(prefix="tilewright-tests-")
        os.environ["TILEWRIGHT_CACHE"] = folder
        os.environ["TILEWRIGHT_READ_CODE"] = "0"  # results do not depend on it; tests of choosing by code override it
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """The garbage collector passes only over what a module's tests make: imported modules and the tests themselves are millions of objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def no_better_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for new sizes keep the schedules of others, except in tests that are about the better ones: these are made on threads, at any time."""
    if request.node.get_closest_marker("better_programs") is None:
        monkeypatch.setattr("tilewright.runtime.dynamic.DynamicExecutable._make_better", lambda executable, served: None)
        monkeypatch.setattr("tilewright.runtime.dynamic.REST_SECONDS", 0.0)  # nothing rests before nothing is made


@pytest.fixture(autouse=True)
def nothing_in_the_background() -> Iterator[None]:
    """Programs that a test has built in the background are done before the next test, which may watch or replace what builds them."""
    yield
    wait_for_all()


@pytest.fixture
def by_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices for CPUs that were not measured are those of the analytical models alone, on which the test relies for the case that it is about."""
    monkeypatch.setattr("tilewright.selection.learned.cpu.SHARE_ELSEWHERE", 0.0)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in left_for_later([item for item in items if item.get_closest_marker("in_turns") is not None]):
        item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
