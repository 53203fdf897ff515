"""This machine: hardware, gauges, processes, files, prices and recommended settings.

Start with `machine`. Knows nothing about experiments or results.
"""
