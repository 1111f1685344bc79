"""Loading and running compiled programs: the executable, its memory, CPU and GPU engines, and artifacts."""
