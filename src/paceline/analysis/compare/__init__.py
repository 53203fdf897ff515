"""Comparisons: cells with each other, two result folders, a history, scaling, designed experiments, recommendations.

May import the other parts of `analysis` except `report`, `reproduction` and `cost`. Every verdict comes from
`statistics.verdict`. Start with `cells` (ranking within one report) and `folders` (A against B).
"""
