"""How findings read: numbers rounded by their uncertainty, cells in their places, tables, and the terminal.

quantity < facts, standing < tables < links < fabric, memory, ceilings, scaling, effects, verdicts, cost, claims,
between < history < machine, answer < terminal < replay; charts stand beside the terminal. Exporters and the command
line print what stands here, no more.
"""

from paceline.report.answer import recommendation_lines
from paceline.report.terminal import (
    cost_group,
    drawn,
    failures_table,
    machine_group,
    ranked_table,
    scaling_table,
    verdicts_group,
)
from paceline.wording import format_quantity

__all__ = [
    "cost_group",
    "drawn",
    "failures_table",
    "format_quantity",
    "machine_group",
    "ranked_table",
    "recommendation_lines",
    "scaling_table",
    "verdicts_group",
]
