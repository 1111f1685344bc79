"""Convolutions by transforms of blocks, whose products are of pairs of TF32 numbers."""
