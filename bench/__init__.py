"""Measurements against other frameworks, and reproductions of the papers' tables; results are in bench/results."""
