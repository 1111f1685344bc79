"""What is asked of the operating system: shared objects in memory."""
