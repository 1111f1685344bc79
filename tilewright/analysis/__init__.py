"""Static analysis: what a kernel will do, read from its loops and from the code that the compiler made of them, without running it."""
