"""Paceline: a benchmark for distributed LLM training whose numbers can be trusted."""

__version__ = "0.1.0"
