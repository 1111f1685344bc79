"""Schemas of GPUs."""
