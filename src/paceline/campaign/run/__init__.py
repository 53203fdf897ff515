"""Running one experiment: `controller` runs each spec, `supervision` follows its job, `replay` repeats a capsule.

Launchers, workloads and engines are loaded as plugins, by name. Imports no other part of `campaign`. Start with
`controller.campaign`.
"""
