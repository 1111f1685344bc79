"""Tilewright: a deep-learning compiler that plans instead of searching."""
