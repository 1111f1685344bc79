"""The types that travel between the stages of the compiler, and nothing else."""
