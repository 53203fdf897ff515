"""Training: the certificate of equal work, metrics, bottlenecks, memory, energy and goodput.

Start with `certificate` and `metrics`.
"""
