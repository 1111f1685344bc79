"""Schemas of CPUs."""
