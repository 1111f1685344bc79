"""The instructions of each machine as data, a file for a family; `mma` is the one to read first."""
