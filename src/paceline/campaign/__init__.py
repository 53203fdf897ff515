"""Campaigns: starting runs, repeating them on a schedule, and showing them while they run.

`run` starts, supervises and seals the runs of one experiment (start with `run.controller`); `schedule` knows when runs
are due; `live` shows progress; `scheduled_run` is one run that a schedule starts. May import everything but `cli`.
"""
