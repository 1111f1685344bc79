"""Winograd's algorithm in one kernel."""
