"""This machine: hardware, gauges, processes, files, prices and recommended settings.

Knows nothing about experiments or results, and imports only `errors` of Paceline. torch is never needed:
planning and `paceline doctor` work without it. Start with `machine`.
"""
