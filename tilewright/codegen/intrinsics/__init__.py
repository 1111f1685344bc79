"""The instructions of each machine as data, one file per family; read `mma` first."""
