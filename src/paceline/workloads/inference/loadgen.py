"""LoadGen after the load of this client, over the same replicas: two verdicts of one set-up.

It is the second load of the same run, not a run of its own, so that engine, prompts, limits and the state of the
machine are the same for both; and because `Offline` there must be told beforehand how fast the system is, which the
first load has just shown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.contract import Endpoint, Recorder
from paceline.errors import RequestError, require
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.results.served_samples import LoadgenSample
from paceline.serving.client import mlcommons
from paceline.serving.prompts import Prompt
from paceline.workloads.inference.loads import OFFLINE_CAP
from paceline.workloads.inference.requests import body, head, target_of

PHASE = "timing: LoadGen asks"


def is_asked(spec: RunSpec) -> bool:
    return spec.serving is not None and spec.serving.loadgen == "mlcommons"


def check(spec: RunSpec) -> None:
    """RequestError where LoadGen has no such test, or is not installed where it would run."""
    if not is_asked(spec):
        return
    assert spec.serving is not None
    accepted = f"{', '.join(mlcommons.SCENARIOS)} with loadgen=mlcommons"
    require(spec.serving.scenario in mlcommons.SCENARIOS, "scenario", spec.serving.scenario, accepted)
    shared = spec.serving.partition != "paired"
    require(shared, "partition", spec.serving.partition, "static or dynamic with loadgen=mlcommons")
    # On other hosts it may be there though it is not here: rank 0 then says so.
    if getattr(load("launchers", spec.launcher.name), "HERE", False) and not mlcommons.is_installed():
        raise RequestError(
            "loadgen: 'mlcommons' was given, which needs the package mlcommons-loadgen: "
            f"run `pip install {mlcommons.INSTALL}`"
        )


def require_installed(spec: RunSpec) -> None:
    """On the host of the client, before anything is asked: not after the first load has taken its time."""
    if is_asked(spec):
        mlcommons.require_installed()


def terms_of(spec: RunSpec, samples: int, pace_per_s: float) -> mlcommons.Terms:
    """The same set-up in LoadGen's words. It draws samples with replacement where ours are each once (`Server`)."""
    assert spec.serving is not None
    asked = spec.serving
    limits = asked.limits
    return mlcommons.Terms(
        scenario=asked.scenario,
        samples=samples,
        requests=asked.requests or samples,
        seed=spec.seed,
        rate_per_s=asked.rate_per_s,
        expected_per_s=max(pace_per_s, 1e-3),
        least_s=asked.least_s,
        ttft_s=limits["ttft_s"],
        tpot_s=limits["tpot_s"],
        cap=asked.concurrency or OFFLINE_CAP if asked.scenario == "offline" else asked.concurrency,
        timeout_s=asked.request_timeout_s,
        shared=asked.partition == "dynamic",
    )


def ask(
    spec: RunSpec,
    recorder: Recorder,
    prompts: Sequence[Prompt],
    endpoints: Sequence[Endpoint],
    pace_per_s: float,
) -> None:
    """One whole test of LoadGen, its logs and what it concluded: the same prompts to the same replicas. The pace is
    what this client's own load reached, requests a second."""
    assert spec.serving is not None
    api = spec.serving.api
    heads = [head(endpoint, api) for endpoint in endpoints]
    payloads = [[heads[n] + body(prompt, each, api) for n, each in enumerate(endpoints)] for prompt in prompts]
    targets = [target_of(endpoint, api) for endpoint in endpoints]
    terms = terms_of(spec, len(prompts), pace_per_s)
    with tempfile.TemporaryDirectory(prefix="paceline-loadgen-") as folder:
        told = mlcommons.drive(terms, payloads, targets, Path(folder), lambda: recorder.progress(0, PHASE))
        for name in mlcommons.LOGS:
            if (path := Path(folder, name)).is_file():
                recorder.keep(name, path.read_bytes())
    recorder.add(LoadgenSample(rank=0, scenario=mlcommons.SCENARIOS[terms.scenario], **asdict(told)))
