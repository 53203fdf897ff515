"""Training: the certificate of equal work, metrics, bottlenecks, memory, energy and goodput.

Reads the records of runs and their samples. May import `machine`, `statistics` and `findings`. Start with
`certificate` (what must be equal) and `metrics` (every number with its formula).
"""
