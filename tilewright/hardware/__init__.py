"""Facts about targets: the ``Machine`` type, the catalogue, and the identification of this host."""

from __future__ import annotations

from tilewright.hardware.machine import Cache as Cache
from tilewright.hardware.machine import Machine as Machine
