"""Launchers: how a job is started on this machine, Kubernetes, Slurm, SSH or Ray.

One module or subpackage per launcher; `node` is what runs on each node. Start with `local`, the shortest. May import
`contract` and below.
"""
