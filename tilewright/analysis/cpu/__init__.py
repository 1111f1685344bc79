"""Static analysis of CPU kernels: instructions, pipelines, cache misses."""
