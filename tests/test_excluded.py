"""What rules that shorten a space exclude (`bench.excluded`), with trials that need no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest

from bench import excluded
from tests.stand_ins import H200, SMALL
from tilewright.selection.choice import rank
from tilewright.tuning.serialisation import schedule_text
from tilewright.tuning.trials import Job, Outcome, Timing

OPTIONS = argparse.Namespace(first=2, evenly=1, seed=0, again=2, rounds=3)


class Made:
    """Trials in which schedules take these microseconds; others fail."""

    def __init__(self, microseconds: dict[str, float]) -> None:
        self.microseconds = microseconds

    def measure(self, jobs: Sequence[Job], rounds: int = 1) -> Iterator[Outcome]:
        for job in jobs:
            taken = self.microseconds.get(str(job.key))
            yield Outcome(job, "failed") if taken is None else Outcome(job, "measured", timing=Timing.of([1e-6 * taken]))

    remeasure = measure


@pytest.mark.parametrize(("failing", "lost"), [("", 1.0), ("kept", None), ("excluded", None), ("kept excluded", None)])
def test_a_part_whose_candidates_all_fail_has_no_best(failing: str, lost: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [schedule_text(choice.schedule) for choice in islice(rank(SMALL, H200), 6)]
    parts = {"kept": texts[::2], "excluded": texts[1::2]}
    listings = iter((parts["kept"], texts))
    monkeypatch.setattr(excluded, "direct_texts", lambda *_: next(listings))
    times = {"kept": 6.0, "excluded": 3.0}
    made: Any = Made({text: times[name] + number for name, own in parts.items() for number, text in enumerate(own) if name not in failing.split()})
    found = excluded.measure(SMALL, H200, made, OPTIONS)
    assert found is not None and found["lost"] == (lost if lost is None else pytest.approx(lost))
    for name, own in parts.items():
        failed = name in failing.split()
        assert found[f"best {name}"] == (None if failed else own[0]) and found[f"measured {name}"] == (0 if failed else 3)
        assert found[f"best {name} us"] == (None if failed else pytest.approx(times[name]))
