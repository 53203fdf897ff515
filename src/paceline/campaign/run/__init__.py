"""Running one experiment: `controller` runs each spec, `supervision` follows its job, `replay` repeats a capsule.

Start with `controller.campaign`. Launchers, workloads and engines are loaded as plugins, by name.
"""
