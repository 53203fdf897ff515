"""Training data: token files, instruction files, synthetic instructions, packing and digests. Start with `corpus`."""
