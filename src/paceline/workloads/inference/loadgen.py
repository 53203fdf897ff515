"""MLCommons LoadGen after the load of this client, over the same replicas: two verdicts on one setup.

It is the second load of the same run, not a run of its own, so that engine, prompts, limits and machine state are the
same for both. LoadGen's `Offline` must also know the expected speed beforehand, which the first load has just measured.
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
from paceline.workloads.inference.session import body, head, target_of

PHASE = "timing: LoadGen"


def is_requested(spec: RunSpec) -> bool:
    return spec.serving is not None and spec.serving.loadgen == "mlcommons"


def check(spec: RunSpec) -> None:
    """RequestError if LoadGen has no such test, or is not installed where it would run."""
    if not is_requested(spec):
        return
    assert spec.serving is not None
    accepted = f"{', '.join(mlcommons.SCENARIOS)} with loadgen=mlcommons"
    require(spec.serving.scenario in mlcommons.SCENARIOS, "scenario", spec.serving.scenario, accepted)
    shared = spec.serving.partition != "paired"
    require(shared, "partition", spec.serving.partition, "static or dynamic with loadgen=mlcommons")
    # Another host may have the package although this one does not; then rank 0 reports it.
    if getattr(load("launchers", spec.launcher.name), "HERE", False) and not mlcommons.is_installed():
        raise RequestError(
            f"loadgen: 'mlcommons' needs the package mlcommons-loadgen. Run `pip install {mlcommons.INSTALL}`"
        )


def require_installed(spec: RunSpec) -> None:
    """Check the client's host before anything is sent, not after the first load."""
    if is_requested(spec):
        mlcommons.require_installed()


def terms_of(spec: RunSpec, samples: int, pace_per_s: float) -> mlcommons.Terms:
    """The same setup as LoadGen's settings. Its `Server` draws samples with replacement; ours sends each once."""
    assert spec.serving is not None
    serving = spec.serving
    limits = serving.limits
    return mlcommons.Terms(
        scenario=serving.scenario,
        samples=samples,
        requests=serving.requests or samples,
        seed=spec.seed,
        rate_per_s=serving.rate_per_s,
        expected_per_s=max(pace_per_s, 1e-3),
        least_s=serving.least_s,
        ttft_s=limits["ttft_s"],
        tpot_s=limits["tpot_s"],
        cap=serving.concurrency or OFFLINE_CAP if serving.scenario == "offline" else serving.concurrency,
        timeout_s=serving.request_timeout_s,
        shared=serving.partition == "dynamic",
    )


def run_test(
    spec: RunSpec, recorder: Recorder, prompts: Sequence[Prompt], endpoints: Sequence[Endpoint], pace_per_s: float
) -> None:
    """Run one LoadGen test with the same prompts and replicas, and record its logs and conclusion. pace_per_s: what
    this client's own load reached, in requests per second."""
    assert spec.serving is not None
    api = spec.serving.api
    heads = [head(endpoint, api) for endpoint in endpoints]
    payloads = [[heads[n] + body(prompt, each, api) for n, each in enumerate(endpoints)] for prompt in prompts]
    targets = [target_of(endpoint, api) for endpoint in endpoints]
    terms = terms_of(spec, len(prompts), pace_per_s)
    with tempfile.TemporaryDirectory(prefix="paceline-loadgen-") as folder:
        conclusion = mlcommons.drive(terms, payloads, targets, Path(folder), lambda: recorder.progress(0, PHASE))
        for name in mlcommons.LOGS:
            if (path := Path(folder, name)).is_file():
                recorder.keep(name, path.read_bytes())
    recorder.add(LoadgenSample(rank=0, scenario=mlcommons.SCENARIOS[terms.scenario], **asdict(conclusion)))
