"""Python's collector of reference cycles while a model is planned, and afterwards."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch

import tilewright
from tilewright.system.collection import collection_paused

pipeline = importlib.import_module("tilewright.compile")


@pytest.mark.parametrize("runs", [True, False])
def test_it_runs_afterwards_if_it_ran_before(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, seen = pipeline.plan_program, []

    def observed(*arguments: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        return plan(*arguments, **options)

    monkeypatch.setattr(pipeline, "plan_program", observed)
    if not runs:
        gc.disable()
    try:
        tilewright.compile(torch.nn.Linear(3, 4), (torch.randn(2, 3),), target="native", threads=1).close()
        assert gc.isenabled() == runs and seen == [False]
        with pytest.raises(ZeroDivisionError), collection_paused():
            raise ZeroDivisionError
        assert gc.isenabled() == runs
    finally:
        gc.enable()


def test_what_the_process_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()  # of which other threads may free some
        with collection_paused():
            assert 0.9 * frozen < gc.get_freeze_count() <= frozen
        assert 0.9 * frozen < gc.get_freeze_count() <= frozen and gc.isenabled()
    finally:
        gc.unfreeze()


def test_cycles_made_meanwhile_are_collected_later() -> None:
    class Ring:
        def __init__(self) -> None:
            self.itself = self

    with collection_paused():
        made = weakref.ref(Ring())
        assert made() is not None
    gc.collect()
    assert made() is None
