"""Results: the run folder and everything in it. Reads and writes files, concludes nothing.

`records` defines what a run leaves, `store` reads and writes it, `capsule` packs it. Start with `store`. May import
`models`, `experiment` and `host`.
"""
