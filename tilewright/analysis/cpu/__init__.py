"""What the code of CPU kernels does: instructions, pipelines, cache misses."""
