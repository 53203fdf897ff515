"""Machine measurements: collectives, links, compute ceilings, and whether each node is healthy.

Devices are compared with their peers, without a stored baseline. May import `statistics` and `findings`. Start with
`fabric` (a network) or `nodes` (an acceptance test).
"""
