"""Machine measurements: collectives, compute ceilings, node acceptance. Start with `fabric` or `nodes`."""
