"""Attention of few queries, split over keys."""
