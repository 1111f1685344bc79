"""Python's collector of reference cycles while a model is planned, and afterwards."""

from __future__ import annotations

import gc
import importlib
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
