"""Products of few rows."""
