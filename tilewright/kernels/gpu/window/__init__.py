"""Small reductions, an output a thread."""
