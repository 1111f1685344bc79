"""What is asked of the operating system: files of one user alone, programs that end, shared objects in memory."""
