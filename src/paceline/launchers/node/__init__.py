"""What runs on each node of a job: the agent, its rendezvous with the other nodes, and the transport of its files.

Start with `agent` (`python -m paceline.launchers.node.agent`).
"""
