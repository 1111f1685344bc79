"""Library kernels, through PyTorch, as candidates that only measurements can choose."""
