"""Implicit GEMM by warpgroups, whose factors the copy engine brings (Hopper)."""
