"""Imported by the fork server of `bench.processes`; reads one model, so that everything that reading needs is imported."""

from __future__ import annotations

import gc
import warnings

import torch

import tilewright.cli
import tilewright.report.tables
import tilewright.tuning.tuning  # noqa: F401
from tilewright.compile import read

warnings.filterwarnings("ignore", category=RuntimeWarning, message=".*found in sys.modules after import")  # the program's module is also `__main__`
torch.set_num_threads(1)
read(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
gc.collect()
gc.freeze()  # children need not pass over what they share with this process, which would copy its pages
