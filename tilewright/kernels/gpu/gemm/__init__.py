"""Implicit GEMM through shared memory."""
