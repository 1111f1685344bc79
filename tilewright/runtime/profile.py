"""``Profile``: the measured time of each region within whole calls of an executable, as a table and as a trace for the viewers of browsers.

Regions run in their order over the buffers of the executable, so that each finds the caches as its predecessors leave them. On a CPU the loop that
calls the kernels reads the clock after each; on a GPU there are events between regions, which then run one after another, and the time of an empty
pair of events is subtracted from each region's. Calls without clocks are timed in turns with those.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilewright.files import written
from tilewright.runtime.loadable import LoadableProgram
from tilewright.system.counters import EVENTS, is_hardware
from tilewright.text import WIDTH, aligned, number_of, scaled

SHORT = {"instructions": "instr.", "L1 misses": "L1", "last-level misses": "last level", "branch misses": "branches", "page faults": "faults"}
"""The headings of events in a table of 80 columns."""


@dataclass(frozen=True)
class Span:
    """What one region, numbered from 0, did between two moments of a call, in seconds. A region with a library's operator has a second span for its
    kernels."""

    region: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RegionProfile:
    """One region; `number` is its place in the plan, from 1, and `seconds` has an entry per call. `predicted_seconds` is 0 without a
    prediction. `counts` are of the events of one call (`system.counters.EVENTS`) that this machine counts."""

    number: int
    name: str
    kind: str
    operators: tuple[str, ...]
    schedule: str
    kernels: tuple[str, ...]
    predicted_seconds: float
    seconds: tuple[float, ...]
    counts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartile_seconds(self) -> tuple[float, float]:
        """The first and the third quartile; both the median of fewer than two calls."""
        return quartiles(self.seconds)


@dataclass(frozen=True)
class Profile:
    """The regions that run something, in order of execution.

    call_seconds: of calls without clocks between regions; they include the allocation of results and not the checks of arguments.
    timeline: the call with clocks whose duration is the median.
    clocked_seconds: of whole calls with clocks; none on a GPU, which idles in them.
    clock_seconds: what was subtracted from the time of each region for its clocks.
    uncounted: why events are not counted here, by event; of a GPU none are.

    `str()` is a table of 80 columns."""

    machine: str
    regions: tuple[RegionProfile, ...]
    call_seconds: tuple[float, ...]
    timeline: tuple[Span, ...]
    clocked_seconds: tuple[float, ...] = ()
    clock_seconds: float = 0.0
    uncounted: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def hottest(self) -> tuple[RegionProfile, ...]:
        return tuple(sorted(self.regions, key=lambda region: -region.median_seconds))

    @property
    def times(self) -> Mapping[int, float]:
        """The median seconds of each region by its number, for `Plan.with_times`."""
        return {region.number: region.median_seconds for region in self.regions}

    @property
    def _sums(self) -> tuple[float, ...]:
        """The seconds of all regions, for each call with clocks."""
        return tuple(map(sum, zip(*(region.seconds for region in self.regions), strict=True))) or (0.0,)

    @property
    def region_seconds(self) -> float:
        """The median over calls of the sum of all regions."""
        return statistics.median(self._sums)

    @property
    def outside_seconds(self) -> float:
        """How much longer a call takes than its regions: the median over calls with clocks; on a GPU of calls without, and 0 if they take less time
        than all regions, since regions of a call may overlap there."""
        if self.clocked_seconds:
            return statistics.median(whole - regions for whole, regions in zip(self.clocked_seconds, self._sums, strict=True))
        return max(statistics.median(self.call_seconds) - self.region_seconds, 0.0)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        whole = self.region_seconds or 1.0
        rows = []
        for region in self.hottest:
            median, (low, high) = region.median_seconds, region.quartile_seconds
            spread = f"{50 * (high - low) / median:.1f} %" if median else "-"
            predicted = region.predicted_seconds
            known = (f"{1e6 * predicted:,.1f}", f"{median / predicted:.2f}") if predicted else ("-", "-")
            rows.append((str(region.number), region.name, region.kind, f"{100 * median / whole:.1f} %", f"{1e6 * median:,.1f}", spread, *known))
        headings = ("", "region", "kind", "share", "us", "+-", "predicted", "ratio")
        yield from aligned(headings, rows, ("region", "kind"), WIDTH, {"region": 1.0})
        yield from self.summary_lines()
        yield from self._counter_lines()

    def _counter_lines(self) -> Iterator[str]:
        """The counts of each region, if the processor's are among them, and what is not counted."""
        events = [event for event in EVENTS if any(event in region.counts for region in self.regions)]
        if any(is_hardware(event) for event in events):
            rows = []
            for region in self.hottest:
                counts = region.counts
                cycles = counts.get("cycles", 0.0)
                per_cycle = f"{counts['instructions'] / cycles:.2f}" if cycles and "instructions" in counts else "-"
                rows.append((str(region.number), region.name, *(scaled(counts.get(event, 0.0), "") for event in events), per_cycle))
            headings = ("", "region", *(SHORT.get(event, event) for event in events), "per cycle")
            yield from aligned(headings, rows, ("region",), WIDTH, {"region": 1.0})
            yield "events of one call in user mode, all threads; misses: reads of data, branches"
        elif any(region.counts.get("page faults") for region in self.regions):
            yield f"page faults of a call: {sum(region.counts['page faults'] for region in self.regions):,.0f}"
        reasons = dict.fromkeys(reason for event, reason in self.uncounted.items() if is_hardware(event))
        if reasons:
            missing = [event for event in self.uncounted if is_hardware(event)]
            yield f"not counted here: {', '.join(missing)}"
            yield from (f"   ({reason})" for reason in reasons)

    def summary_lines(self) -> Iterator[str]:
        """How the times were taken, and how those of the regions add up to that of a call."""
        low, high = quartiles(self.call_seconds)
        call = statistics.median(self.call_seconds)
        yield f"medians of {number_of(len(self.call_seconds), 'call')}; +-: half the interquartile range"
        yield "share: of all regions; ratio: us / predicted"
        predicted = sum(region.predicted_seconds for region in self.regions)
        yield f"{self.machine}: all regions {1e6 * self.region_seconds:,.1f} us, predicted {1e6 * predicted:,.1f} us"
        yield f"calls without clocks {1e6 * call:,.1f} us (+- {50 * (high - low) / call:.1f} %)"
        if self.clocked_seconds:
            call = statistics.median(self.clocked_seconds)
            yield f"calls with clocks {1e6 * call:,.1f} us"
        if self.clock_seconds:
            yield f"subtracted from each region: {1e6 * self.clock_seconds:,.1f} us, an empty pair of events"
        if self.region_seconds > call:
            yield f"clocks cost {1e6 * (self.region_seconds - call):,.1f} us: without them regions overlap"
        else:
            yield f"outside of regions {1e6 * self.outside_seconds:,.1f} us ({100 * self.outside_seconds / call:.1f} %)"

    def trace(self) -> dict[str, Any]:
        """The median call in the Chrome trace-event format, with a second row of the predicted times, each from where its region began.

        Source: "Trace Event Format", Google, 2016.
        """
        by_number = {region.number: region for region in self.regions}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"tilewright, {self.machine}"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "measured"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "predicted"}},
        ]
        predicted_to = 0.0
        for span in self.timeline:
            region = by_number[span.region + 1]
            common = {"ph": "X", "name": region.name, "cat": region.kind, "pid": 1, "ts": 1e6 * span.start}
            events.append({**common, "tid": 1, "dur": 1e6 * span.seconds, "args": _arguments(region)})
            if region.predicted_seconds and span.start >= predicted_to:
                events.append({**common, "tid": 2, "dur": 1e6 * region.predicted_seconds})
        return {"displayTimeUnit": "ns", "traceEvents": events}

    def save_trace(self, path: str | Path) -> None:
        """Writes `trace` as JSON, for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        with written(path) as file:
            file.write(json.dumps(self.trace()).encode())


def _arguments(region: RegionProfile) -> Mapping[str, Any]:
    return {
        "region": region.number,
        "operators": ", ".join(region.operators),
        "schedule": region.schedule,
        "kernels": ", ".join(region.kernels),
        "median us": 1e6 * region.median_seconds,
        "predicted us": 1e6 * region.predicted_seconds,
        **region.counts,
    }


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; both the median of fewer than two values."""
    if len(seconds) < 2:
        return (statistics.median(seconds),) * 2
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def profile_of(
    program: LoadableProgram,
    machine: str,
    call_seconds: Sequence[float],
    calls: Sequence[Sequence[Span]],
    clocked_seconds: Sequence[float] = (),
    clock_seconds: float = 0.0,
    counts: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    uncounted: Mapping[str, str] = MappingProxyType({}),
) -> Profile:
    """The profile of a program on a machine, given the seconds of calls without clocks, the spans of calls with them, the seconds of those calls as a
    whole, the part of each span that is its clock's, and the counts of events by region, with the reasons why there are no others."""
    calls = [[replace(span, end=max(span.start, span.end - clock_seconds)) for span in call] for call in calls]
    ran = sorted({span.region for span in calls[0]})
    seconds = {index: tuple(sum(span.seconds for span in call if span.region == index) for call in calls) for index in ran}
    regions = []
    for index in ran:
        region = program.regions[index]
        operators = tuple(program.nodes[name].operator_name for name in region.nodes)
        kernels = tuple(dict.fromkeys(call.kernel for call in region.calls))
        regions.append(
            RegionProfile(
                index + 1,
                region.name,
                region.kind,
                operators,
                region.schedule,
                kernels,
                region.predicted_seconds,
                seconds[index],
                counts.get(index, {}),
            )  # fmt: skip
        )
    middle = sorted(calls, key=lambda call: call[-1].end if call else 0.0)[(len(calls) - 1) // 2]
    return Profile(machine, tuple(regions), tuple(call_seconds), tuple(middle), tuple(clocked_seconds), clock_seconds, uncounted)
