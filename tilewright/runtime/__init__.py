"""Running compiled programs: the executable, its memory, CPU and GPU engines, artifacts; measuring candidates, and records of it."""
