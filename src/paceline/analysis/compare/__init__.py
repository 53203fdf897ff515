"""Comparisons: cells with each other, two result folders, a history, scaling, designed experiments, recommendations.

Start with `cells` (ranking within one report) and `folders` (A against B).
"""
