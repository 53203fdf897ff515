"""Showing findings: terminal, Markdown, one HTML page, plots and exports to other tools.

Reads findings of `analysis` and concludes nothing. `text` names things, `tables` builds tables, `charts` builds charts,
`exporters` writes files. Start with `answer` (the headline) and `terminal`. May import `analysis` and below.
"""

from paceline.report.answer import brief_lines, recommendation_lines
from paceline.report.terminal import brief_group, drawn, section_group
from paceline.wording import format_quantity

__all__ = ["brief_group", "brief_lines", "drawn", "format_quantity", "recommendation_lines", "section_group"]
