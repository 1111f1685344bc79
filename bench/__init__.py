"""Measurements against peers, and reproductions of the papers' tables; results are in bench/results."""
