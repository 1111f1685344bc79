"""Schemas: ways of computing one kind of region, a folder each, from recognising it to its kernels."""
