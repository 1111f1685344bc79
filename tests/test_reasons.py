"""Reasons name the values of the model, also where a problem under canonical names was judged, once for all that are equal."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition.canonical import with_names
from tilewright.partition.plan import plan_program


@pytest.mark.parametrize("target", ["x86-avx512", "h200"])
def test_chains_and_pooling_that_no_kernel_computes(target: str) -> None:
    layers = [layer for _ in range(2) for layer in (nn.Conv2d(6, 6, 5), nn.Tanh(), nn.AvgPool2d(2))]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 4 * 4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30)).eval()
    graph, _ = simplify(import_module(module, (torch.zeros(1, 6, 28, 28),)).graph)
    program = plan_program(graph, machine(target), 1, chains=True)
    texts = [decision.text for decision in program.search]
    refused = [text for text in texts if "no kernel does both" in text or "cannot be one kernel" in text]
    assert refused
    told = [*texts, *(reason for region in program.regions for reason in region.region.reasons)]
    assert not [text for text in told if re.search(r"\bvalue\d", text)]
    read = [found for text in refused if (found := re.search(r"(?:all rows of|all of|result of region) (\w+)", text))]
    assert read and all(found[1] in program.graph.values for found in read)
    assert len({found[1] for found in read}) > 1


def test_names_in_texts() -> None:
    assert with_names("value1 of value10, value1.s and values2", {"value1": "a", "value10": "b"}) == "a of b, a.s and values2"
