"""Statistics: confidence intervals, verdicts on ratios, change points. Pure functions of numbers.

Start with `intervals` and `verdict`.
"""
