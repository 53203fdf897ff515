"""Workloads: what a rank does. One module or subpackage per workload; `worker` is the process that runs them.

Start with `worker` (`python -m paceline.workloads.worker RUN_DIR`), then `pretrain`, the simplest workload. May import
`serving`, `training`, `launchers.node` and below.
"""
