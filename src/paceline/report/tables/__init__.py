"""Tables of the report, one module per subject; every renderer (terminal, Markdown, page) shows the same ones.

Start with `table`, which defines `Table`.
"""
