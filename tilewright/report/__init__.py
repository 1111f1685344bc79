"""Reports for people: the explanation of a compiled program, and tables for the terminal."""
