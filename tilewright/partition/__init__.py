"""Which operators share a kernel, and how the values between kernels are laid out; each decision with its reason."""
