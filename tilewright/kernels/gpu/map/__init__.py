"""Maps: elements or vectors per thread."""
