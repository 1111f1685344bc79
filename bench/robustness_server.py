"""Imported by the process that forks those of `bench.robustness`: one model is read, so that all that reading imports is there."""

from __future__ import annotations

import torch

from bench.robustness import network
from tilewright.compile import read

torch.set_num_threads(1)
module, x = network(0)
read(module, (x,))
