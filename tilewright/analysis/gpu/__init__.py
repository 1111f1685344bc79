"""What GPU kernels do: accesses by warp, executed PTX, traffic, time."""
