"""Schemas: ways of computing one kind of region, from recognising it to its kernels. Each has a folder."""
