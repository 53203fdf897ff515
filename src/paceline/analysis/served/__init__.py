"""Inference: latencies, throughput, validity, accuracy and equal work of load tests.

Start with `loads` (one load of one run), then `measurements` and `verdicts`.
"""
