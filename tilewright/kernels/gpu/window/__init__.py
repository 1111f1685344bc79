"""Small reductions, each done serially by one thread."""
