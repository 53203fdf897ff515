"""How findings read: numbers rounded by their uncertainty, cells in their places, tables, and the terminal.

quantity < facts, standing < tables < links < fabric, memory, ceilings, scaling < machine, answer < terminal; charts
stand beside the terminal. Exporters and the command line print what stands here, no more.
"""

from paceline.present.answer import recommendation_lines
from paceline.present.quantity import format_quantity
from paceline.present.terminal import comparison_table, failures_table, machine_group, ranked_table, scaling_table

__all__ = [
    "comparison_table",
    "failures_table",
    "format_quantity",
    "machine_group",
    "ranked_table",
    "recommendation_lines",
    "scaling_table",
]
