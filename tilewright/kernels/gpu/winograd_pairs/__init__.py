"""Convolutions by transforms of blocks, whose products are of pairs of narrower numbers."""
