"""A script with `deepspeed.initialize`: ZeRO stages 0 (plain data parallel) to 3."""

from __future__ import annotations

import os

from paceline.examples.work import Work, batches, build_model, build_optimizer, prepare_deepspeed, run, zero_config

# Of a script that nobody started as a rank.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def train(work: Work) -> None:
    os.environ |= {**ALONE, **os.environ}
    import deepspeed

    model = build_model(work)
    prepare_deepspeed(work)
    model = model.to(work.own_device)
    config = zero_config(work, int(work.strategy[-1]))
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(work, model), config=config)
    if work.best:
        engine.compile()
    for batch in batches(work):
        engine.backward(engine(**batch).loss)
        engine.step()


if __name__ == "__main__":
    run("deepspeed", train)
