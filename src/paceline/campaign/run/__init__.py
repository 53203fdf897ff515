"""Running one experiment: `controller` starts each run, `supervision` watches it, `replay` repeats a capsule.

Start with `controller.run`. Imports launchers and results through the plugin registry and `results.store`.
"""
