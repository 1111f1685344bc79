"""Depthwise convolutions in register tiles."""
