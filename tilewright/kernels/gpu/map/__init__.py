"""Maps: an element or vector a thread."""
