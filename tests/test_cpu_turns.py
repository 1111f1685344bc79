"""Random products of many rows, timed in turns: what is drawn, what an order loses, and that calls are timed and compiled."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from bench import cpu_choice, cpu_turns
from tilewright.hardware import machine
from tilewright.selection.choice import rank

SMALL = "linear:101,64,64,0"


def test_draws_are_of_many_rows_and_of_no_judged_model() -> None:
    names = cpu_turns.drawn_names(200, 3)
    assert names == cpu_turns.drawn_names(200, 3) and len(set(names)) == 200 and not {*names} & {*cpu_turns.drawn_names(200, 4)}
    sizes = np.array([[int(size) for size in name.partition(":")[2].split(",")] for name in names])
    rows, channels = sizes[:, 0], sizes[:, 1:3]
    assert (rows % 2 == 1).all() and (rows % cpu_turns.IMAGE_TOKENS != 0).all() and (rows >= 100).all() and (rows <= 4000).all()
    assert (channels % 16 == 0).all() and (channels >= 64).all() and (channels <= 1024).all()
    work = 2.0 * rows * channels.prod(axis=1)
    assert (work > cpu_turns.LEAST_WORK).all() and (work < cpu_turns.MOST_WORK).all()


def test_a_loss_is_that_of_the_first_choice_against_the_best_measured() -> None:
    seconds = np.array([2.0, np.nan, 1.0, 1.5])
    by = {"models": np.array([1.0, 2, 3, 4]), "forest": np.array([4.0, 3, 2, 1]), "other": np.array([4.0, 1, 2, 3])}
    assert cpu_turns.losses(by, seconds) == {"models": 1.0, "forest": 0.5}  # the first choice of the other was not measured


@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="needs a C compiler")
def test_calls_of_compiled_candidates_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_turns, "FEWEST_ROUNDS", 3)
    native = machine("native")
    found = cpu_choice.problem(SMALL, native, 1)
    ranking = rank(found, native, threads=1)
    orders = cpu_turns.orders(ranking, native, [])
    assert all(times.shape == (ranking.candidates,) for times in orders.values()) and "models" in orders
    seconds = cpu_turns.Turns(native).seconds(found, [ranking.choice(position).schedule for position in (0, 1)], 0.0)
    assert seconds.shape == (2,) and (seconds > 0).all()
