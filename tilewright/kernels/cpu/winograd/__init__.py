"""Convolutions by transforms of blocks: Winograd's algorithm, and Fourier transforms for large filters."""
