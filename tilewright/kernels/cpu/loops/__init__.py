"""Loop nests of one form for what has no space."""
