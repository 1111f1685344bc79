"""Predicted time of candidates, from data movement, instructions and the facts of a machine; and the choice of the best."""
