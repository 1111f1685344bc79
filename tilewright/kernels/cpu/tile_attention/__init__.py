"""Attention on tile registers of x86 (AMX)."""
