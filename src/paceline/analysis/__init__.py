"""Conclusions: from records of runs to findings. Reads no files and prints nothing.

`findings` defines what can be concluded, `statistics` the intervals and verdicts, `machine`, `training` and `served`
the three kinds of measurement, `compare` and `cost` what follows from them. Start with `report.build`. May import
`results`, `models`, `experiment` and `host`.
"""
