"""Reports for people: what a compiled program consists of, and why; tables for the terminal."""
