"""What runs on each node of a job: the agent, its rendezvous with the other nodes, and the transport of its files.

The same for every launcher; the lowest part of `launchers`. Start with `agent`
(`python -m paceline.launchers.node.agent`), then `rendezvous` and `log_transport`.
"""
