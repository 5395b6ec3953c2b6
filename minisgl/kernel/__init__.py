"""The arithmetic that is worth a kernel. `reference.py` holds the plain-torch twin of each: the oracle, and the CPU path."""
