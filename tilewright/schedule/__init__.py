"""Schedules: one file a kernel schema, with its parameters, the space of candidates, and what is not feasible and why."""
