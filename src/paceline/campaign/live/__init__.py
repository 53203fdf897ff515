"""Views of a running campaign: terminal display, status, status page, Prometheus endpoint, GPU monitor.

All read the same files that the controller writes. Start with `status`.
"""
