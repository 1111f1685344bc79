"""Features of small reductions for learned models, in addition to counts and estimate."""

from __future__ import annotations

import numpy as np

from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.window.estimate import loads_behind_guards
from tilewright.kernels.gpu.window.space import WindowFacts, guarded_places


def window_features(facts: WindowFacts, candidates: Columns) -> dict[str, np.ndarray]:
    """Loads of a thread and how many outputs share them, places behind guards, the share of the tiles that lies inside, and how many positions along
    the fastest axis a block has."""
    rows, items, lanes = candidates["rows"], candidates["items"], candidates["vector_width"]
    loads = sum((loads_behind_guards(load, candidates, facts) for load in facts.loads), np.zeros(len(rows)))
    last_rows, last_items = guarded_places(facts, candidates)
    inside = facts.row_extent * facts.item_extent / ((facts.row_extent + last_rows) * (facts.item_extent + last_items))
    return {
        "loads": loads,
        "registers loaded": loads * lanes,
        "loads an output": loads / (rows * items),
        "guarded": (1 + last_rows) * (1 + last_items),
        "useful tile": inside,
        "tile": rows * items * lanes,
        "across": candidates["threads"] * lanes / facts.inner,
    }
