"""Prints the names of the networks: `python -m tilewright.zoo`."""

from tilewright.zoo import NETWORKS

print("\n".join(f"zoo:{name}" for name in sorted(NETWORKS)))
