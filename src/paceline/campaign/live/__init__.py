"""Views of a running campaign: terminal display, status, status page, Prometheus endpoint, GPU monitor, streams.

All read the files that the controller writes, so they work from any terminal and under every launcher. May import
`campaign.run` and `campaign.schedule`. Start with `status` (one look) or `nodes` (every node and GPU).
"""
