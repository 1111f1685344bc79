"""What the page shows of a program, as values of JSON: the plan, the drawing of its graph, the code of its kernels, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.ir.region import MergeDecision
from tilewright.report.code import ARTIFACT, Progress, calling, kernels_read
from tilewright.report.explanation import chosen, loss_text, memory_lines, region_entries, through_torch_lines, unmeasured_chains
from tilewright.report.page.connections import Connections, connections
from tilewright.report.page.drawing import HEIGHT, WIDTH, drawn
from tilewright.runtime.executable import Image
from tilewright.runtime.plan import Plan, plan_of
from tilewright.runtime.plan_text import operators_of
from tilewright.runtime.profile import Profile

APART = frozenset(("space", "time", "against", "terms", "kernels"))
"""Entries of a region that the page draws from the plan's data."""


@dataclass(frozen=True)
class Subject:
    """One program of a page. `threads`: of its CPU code. `profile`: what was measured, for an executable of this image. `unmeasured`: the chains of a
    GPU that no trial measured (`partition.plan.chains_by_prediction`)."""

    name: str
    image: Image
    threads: int
    profile: Profile | None = None
    unmeasured: tuple[MergeDecision, ...] = ()

    @property
    def plan(self) -> Plan:
        """With the profile's times, if there is one."""
        plan = plan_of(self.image.program, self.image.machine)
        return plan if self.profile is None else plan.with_times(self.profile.times)


def subject_data(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Everything that the page shows of one program. Reads the code of all kernels."""
    image, plan, profile = subject.image, subject.plan, subject.profile
    data = plan.data()
    rows = data["rows"]
    for row, values in zip(plan.rows, rows, strict=True):
        values["operators"] = operators_of(row)
        own = chosen(row)
        for other, found in zip(row.comparison.others, values["comparison"]["others"], strict=True):
            found["loses_by"] = loss_text(other, own)
        values["entries"] = [[label, list(texts)] for label, texts in region_entries(image.program, row) if texts and label not in APART]
    columns, read = kernels_read(image, subject.threads, list(calling(image)), progress)
    kernels = {
        name: {"regions": numbers, "cells": list(read[name].cells), "lines": list(read[name].lines), "source": _source(image, name)}
        for name, numbers in calling(image).items()
    }
    return {
        "name": subject.name,
        "title": f"{subject.name} for {plan.target} ({plan.architecture})",
        **{name: data[name] for name in ("seconds", "predicted_seconds", "calls", "work")},
        "measured": bool(plan.measured),
        "rows": rows,
        "search": [str(decision) for decision in plan.search],
        "unmeasured": unmeasured_chains(subject.unmeasured) if subject.unmeasured else ["", []],
        "partitions": [str(partition) for partition in plan.partitions],
        "graph": graph_data(connections(image.program, plan), image),
        "timeline": [] if profile is None else [[span.region + 1, span.start, span.end] for span in profile.timeline],
        "profile": [] if profile is None else list(profile.summary_lines()),
        "columns": list(columns),
        "kernels": kernels,
        "notes": [*through_torch_lines(image), *memory_lines(image), *([ARTIFACT] if not image.kernels and kernels else [])],
    }


def _source(image: Image, name: str) -> str:
    """The text of a kernel; artifacts put a number before the name of a file."""
    return next((text for file, text in image.sources.items() if file.rpartition(".")[0].endswith(name)), "")


def graph_data(found: Connections, image: Image) -> dict[str, Any]:
    """The drawing: nodes with the number of a region, or the name and value of one of the model's inputs or results."""
    drawing = drawn(found.nodes, found.edges, found.joins)
    values = image.program.graph.values
    nodes = []
    for layer, names in enumerate(drawing.layers):
        for name in names:
            if name in found.joins:
                continue
            what, _, value = name.partition(" ")
            node: Mapping[str, Any] = {"number": int(name)} if name.isdigit() else {"what": what, "value": str(values[value])}
            x, y = drawing.places[name]
            nodes.append({"id": name, **node, "layer": layer, "x": round(x, 1), "y": round(y, 1)})
    segments = [[round(number, 1) for place in ends for number in place] + [source] for *ends, source in drawing.segments]
    return {
        "width": drawing.width,
        "height": drawing.height,
        "box": [WIDTH, HEIGHT],
        "nodes": nodes,
        "edges": [list(edge) for edge in found.direct],
        "segments": segments,
    }
