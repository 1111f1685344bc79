"""Imported by the process that forks those of `bench.robustness`: one model is read, so that all that reading imports is there."""

from __future__ import annotations

import warnings

import torch

from bench.robustness import network
from tilewright.compile import read

warnings.filterwarnings("ignore", category=RuntimeWarning, message=".*found in sys.modules after import")  # the program's module is also `__main__`
torch.set_num_threads(1)
module, x = network(0)
read(module, (x,))
