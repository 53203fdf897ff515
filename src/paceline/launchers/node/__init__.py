"""What runs on each node of a job: the agent, its rendezvous with the others, and the way results come back.

Start with `agent` (`python -m paceline.launchers.node.agent`).
"""
