"""Measures the GPU that is present for ``tilewright calibrate``: a fixed set of layers for about a minute, and the order that they give."""

from __future__ import annotations

import base64
import datetime
import io
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec

from tilewright.errors import CacheError, InvalidInput, UnsupportedOption
from tilewright.hardware.calibration import gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.hardware.measured_order import CORRECTED, MeasuredOrder
from tilewright.selection.learned.gpu import models_for
from tilewright.system.scratch import Scratch
from tilewright.tuning.adapting import EACH, SEED, Adaptation, Order, adapted, layers_to_measure
from tilewright.tuning.collecting import Progress, collect, sample_of
from tilewright.tuning.dataset import MeasuredLayer, read
from tilewright.tuning.trials import Trials


def calibrate(machine: Machine, seconds: float, force: bool = False, progress: Progress | None = None) -> Adaptation:
    """Measures the identified machine, which is this host's GPU, and adapts the order of candidates to it. `force`: also if the package has a model.

    Raises:
        UnsupportedOption: if the package has a model of the machine, or a package that fits is missing.
        InvalidInput: if too few kernels were measured.
        TargetNotPresent, KernelFailed, CacheError: as `Trials`.
    """
    package = models_for(machine)
    if package and not force:
        raise UnsupportedOption(
            f"the package has a model of {machine.name}, trained with many more kernels than a minute measures", "--force compares them all the same"
        )
    missing = [name for module, name in (("scipy", "SciPy"), ("sklearn", "scikit-learn")) if find_spec(module) is None]
    if missing:
        raise UnsupportedOption(f"calibrating a GPU needs {' and '.join(missing)}", "pip install tilewright[train]")
    return adapted(measured(machine, seconds, progress), machine, Order(gpu_calibration(machine), package))


def measured(machine: Machine, seconds: float, progress: Progress | None = None) -> Sequence[MeasuredLayer]:
    """As many layers of the fixed set as the time allows; candidates that fail or are wrong are left out. Raises as `calibrate`."""
    try:
        scratch = Scratch()
    except OSError as error:
        raise CacheError(f"there is no folder for measurements: {error}", "set TMPDIR to a folder that can be written") from error
    with scratch as folder, Trials(machine) as trials:
        path = folder / "measured.jsonl.gz"
        collect(trials, machine, layers_to_measure(), sample_of(EACH, SEED, machine), path, seconds, progress)
        every = read(path) if path.exists() else []
    found = [layer for layer in every if layer.count]
    if every and not found:
        raise InvalidInput(f"no candidate of {len(every)} layers could be measured, the first: {every[0].failures[0][1]}", "nothing was stored")
    return found


def as_stored(found: Adaptation, machine: Machine) -> MeasuredOrder:
    """The content of the machine's file."""
    content = io.BytesIO()
    if found.chosen == CORRECTED:
        found.order.models[0].save(content)
    return MeasuredOrder(
        identity=machine.identity,
        machine=machine.description,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=dict(found.environment),
        kernels=found.kernels,
        layers=found.layers,
        qualities=found.qualities,
        chosen=found.chosen,
        constants=asdict(found.order.constants),
        model=base64.b64encode(content.getvalue()).decode(),
    )
