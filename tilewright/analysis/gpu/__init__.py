"""Static analysis of GPU kernels from their kernel IR and PTX: accesses by warp, executed instructions, traffic between caches, time."""
