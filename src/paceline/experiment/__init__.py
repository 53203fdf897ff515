"""What is requested: the YAML of an experiment, expanded to run specs.

`reading` and `fields` read the file, `expansion` makes the runs, `spec` defines one run, `plugins` finds plugins by
name. Start with `spec`. May import `host` and below.
"""
