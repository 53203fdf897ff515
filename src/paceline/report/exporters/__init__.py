"""Exporters: each module writes the findings in one form; `export` returns the files it wrote."""
