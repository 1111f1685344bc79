"""Which schedule: ranking by the schemas' estimates, corrected by what was learned, and choosing."""
