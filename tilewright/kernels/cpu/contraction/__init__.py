"""Sums of products in register tiles."""
