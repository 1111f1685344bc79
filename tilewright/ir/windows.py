"""Windows that slide along one dimension."""

from __future__ import annotations


def pooled_extent(size: int, window: int, stride: int, padding: tuple[int, int], dilation: int, ceil_mode: bool) -> int:
    """Number of windows along one dimension; with `ceil_mode` a last partial window counts if it starts within the data or its left padding."""
    span = size + sum(padding) - dilation * (window - 1) - 1
    extent = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (extent - 1) * stride >= size + padding[0]:
        extent -= 1
    return extent
