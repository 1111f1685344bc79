"""Regions and schedules to kernel IR, kernel IR to C and CUDA C++, and the interpreter of kernel IR."""
