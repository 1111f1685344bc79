"""Static analysis: predicts what a kernel does from its loops and its compiled code, without running it."""
