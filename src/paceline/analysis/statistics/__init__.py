"""Statistics: confidence intervals, verdicts on ratios, change points.

Pure functions of numbers with fixed seeds, so the same samples give the same result to the last digit. Imports nothing
else of `analysis` but `findings`. Start with `intervals` and `verdict`.
"""
