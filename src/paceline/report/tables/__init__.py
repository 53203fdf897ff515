"""Tables of the report, one module per subject; every renderer (terminal, Markdown, page) shows the same ones.

A table is columns and cells of text, without any layout. May import `report.text` and findings. Start with `table`,
which defines `Table`.
"""
