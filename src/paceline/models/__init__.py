"""Models as shapes and arithmetic, without torch: parameters, FLOPs, memory, wire bytes.

`shape` defines a model, `models.toml` names the known ones, `hf_config` reads the config.json of a directory, and
`arithmetic` computes with all of them. May import `experiment` and `host`. Start with `shape`.
"""
