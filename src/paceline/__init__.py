"""Paceline: a benchmark for distributed LLM training and inference whose numbers can be trusted.

Thirteen packages, in the order ask, launch, measure, store, conclude, show; docs/architecture.md draws them and follows
three requests through the code. Each imports only what is below it. Start with `paceline.cli` for a command, with
`paceline.campaign.run.controller` for how runs are made, or with `paceline.analysis.report` for how they are judged.
"""

__version__ = "0.1.0"
