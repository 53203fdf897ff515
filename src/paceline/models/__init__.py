"""Models as shapes and arithmetic, without torch: parameters, FLOPs, memory, wire bytes.

`shape` defines a model, `arithmetic` computes with it, `models.toml` names the known ones. Start with `shape`.
"""
