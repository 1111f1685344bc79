"""Attention in one kernel."""
