"""What training and inference cost, and what published tables claim about it.

Costs are measured throughput times a price with its source; claims are never measured, ranked or compared. May import
the other parts of `analysis` except `report`, `reproduction` and `compare`. Start with `training`.
"""
