"""Training data: token files, instruction files, synthetic instructions, packing and digests.

Which sequence a rank reads is a function of the step, the seed and its rank alone. Imports no other part of `training`.
Start with `corpus`.
"""
