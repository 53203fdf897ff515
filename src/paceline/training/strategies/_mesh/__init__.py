"""The parts of the strategy `mesh`: stages of the decoder, and one module for each way to split them.

`tensor`, `pipeline`, `context`, `expert` and `shard` each split one dimension; `trainer` puts them together. Start with
`stage`, then `trainer`.
"""
