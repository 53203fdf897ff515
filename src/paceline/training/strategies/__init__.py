"""Strategies: how training is distributed over processes, one plugin per module.

Each wraps the decoder and returns a `Trainer`; modules with an underscore are shared parts. May import the rest of
`training`. Start with `ddp`, the shortest.
"""
