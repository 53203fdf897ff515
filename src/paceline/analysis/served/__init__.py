"""Inference: latencies, throughput, validity, accuracy and equal work of load tests.

Everything is computed from raw requests, never from percentiles of parts. May import `training`, `machine`,
`statistics` and `findings`. Start with `loads` (one load of one run), then `measurements` and `verdicts`.
"""
