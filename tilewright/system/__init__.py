"""Operating-system services: files private to one user, programs that end, shared objects in memory."""
