"""Decides which operators share a kernel, and the layouts of values between kernels; records the reason for each decision."""
