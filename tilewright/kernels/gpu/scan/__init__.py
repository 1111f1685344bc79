"""Cumulative sums and their like."""
