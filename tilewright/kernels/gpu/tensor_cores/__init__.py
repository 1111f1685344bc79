"""Implicit GEMM on tensor cores."""
