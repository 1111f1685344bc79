"""Choosing a schedule: ranking by the schemas' estimates, corrected by learned models, and the choice."""
