"""Networks that compute-sanitizer checks: what is chosen for an H200 are the schedules for which they are there."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilewright.runtime.packing import nearest_tf32

SCHEDULES: dict[str, tuple[str, ...]] = {
    "lenet5": ("contraction", "window", "gemv"),
    "resnet18": ("direct", "winograd fused .* cluster", "winograd F", "contraction .* cluster"),
    "defonet": ("direct", "winograd fused", "row reduction"),
    "inverted": ("contraction", "window"),
    "tagger": (".* steps in one kernel: .* a cluster of", "contraction"),
    "transformer": ("attention", "row reduction"),
    "half convolutions": ("tiles of .*tensor cores.*tensor cores", "warpgroups .* swapped"),
    "half attention": ("tensor attention .* wgmma", "tensor cores .* staged", "warpgroups .* staged", "row reduction"),
    "half recurrent": (".* steps in one kernel: tensor cores",),
    "half meeting": ("warpgroups .* meeting", "warpgroup patches .* meeting", "tensor cores .* cluster"),
    "bf16 convolutions": ("tiles of .*tensor cores.*tensor cores", "warpgroups .* swapped"),
    "bf16 attention": ("tensor attention .* wgmma", "tensor cores .* staged", "warpgroups .* staged", "row reduction"),
    "bf16 recurrent": (".* steps in one kernel: tensor cores",),
    "bf16 meeting": ("warpgroups .* meeting", "warpgroup patches .* meeting", "tensor cores .* cluster"),
    "tf32 convolutions": ("tensor cores", r"warpgroups .* split=\d swapped"),
    "tf32 attention": ("tensor attention", "tensor cores .* staged", "warpgroups .* staged"),
    "tf32 recurrent": (".* steps in one kernel: tensor cores",),
    "tf32 meeting": ("warpgroups .* meeting swapped", "warpgroup patches .* meeting", "tensor cores .* cluster"),
    "paired products": (
        "warpgroups .* split=1 pairs",
        "warpgroups .* split=1 staged pairs",
        r"warpgroups .* split=\d\d pairs",
        "warpgroups .* meeting pairs",
    ),
    "paired convolutions": (
        "winograd F.* split=1 pairs",
        "winograd F.* cluster=2 pairs",
        "winograd F.* persistent pairs",
        "warpgroups .* meeting pairs",
    ),
    "sums": (r"contraction .* split=\d\d", r"gemv .* split=\d\d", "row reduction", "scan"),
}
ROUNDING = {"tf32 convolutions", "tf32 attention", "tf32 meeting"}
"""Networks with values that are rounded where they are stored, for products that would cut them off."""

USUAL = {"half meeting", "bf16 attention", "tf32 convolutions", "tf32 attention", "tf32 meeting", "paired products", "paired convolutions"}
"""Of the networks on tensor cores one of each kind; the others are slow tests."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("gpu_sanitize")


def test_all_networks_have_a_purpose(script: ModuleType) -> None:
    assert SCHEDULES.keys() == script.NETWORKS.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow]) for name in SCHEDULES])
def test_networks_have_their_schedules(name: str, script: ModuleType) -> None:
    executable, _, _ = script.compiled(name, "h200")
    regions = [lowered for lowered in executable.image.program.regions if lowered.calls]
    executable.close()
    chosen = [lowered.schedule for lowered in regions]
    assert not [wanted for wanted in SCHEDULES[name] if not any(re.match(wanted, schedule) for schedule in chosen)], chosen
    rounded = [reason for lowered in regions for reason in lowered.reasons if "is stored as the nearest TF32" in reason]
    assert bool(rounded) is (name in ROUNDING)


@pytest.mark.parametrize("name", ["paired products", "paired convolutions"])
def test_pairs_without_low_parts_are_wrong(name: str, script: ModuleType) -> None:
    torch.manual_seed(7)
    module, inputs = script.NETWORKS[name].build()
    given = inputs()
    with torch.no_grad():
        expected = copy.deepcopy(module).double()(*(x.double() for x in given))
        script.compare(module(*given), expected, "fp32-tensor")
        for parameter in module.parameters():
            parameter.copy_(nearest_tf32(parameter))
        with pytest.raises(AssertionError, match="not close"):
            script.compare(module(*map(nearest_tf32, given)), expected, "fp32-tensor")
