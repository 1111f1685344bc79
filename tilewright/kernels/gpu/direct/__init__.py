"""Direct convolution."""
