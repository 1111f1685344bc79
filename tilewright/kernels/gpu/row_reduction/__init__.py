"""Reductions over whole rows."""
