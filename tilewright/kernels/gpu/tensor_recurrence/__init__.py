"""Recurrent layers of many sequences in one kernel, on tensor cores."""
