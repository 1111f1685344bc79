"""Products of bfloat16 on tile registers."""
