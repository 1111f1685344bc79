"""Cumulative sums and the like."""
