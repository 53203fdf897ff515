"""References: which runs need one, and the plain training loop that does the same work on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import require
from paceline.experiment.choices import Choice
from paceline.experiment.layout import layout_of
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec, Topology, WarmUp
from paceline.models.arithmetic import load as load_shape

# Steps that a reference in fp32 needs no re-seeded copy for.
FEW_STEPS = 20
# Trajectories of a reference coarser than fp32: the spread of the re-seeded ones is the tolerance of the certificate.
VARIANTS = 4
# Most tokens in a micro batch of a reference, and most bytes of their logits: the uncompiled loss keeps those in fp32
# several times, beside a model that may fill most of the device.
REFERENCE_TOKENS = 8192
REFERENCE_LOGIT_BYTES = 2**31


def references_of(specs: Sequence[RunSpec]) -> dict[str, RunSpec]:
    """The one-process reference run for each group of equal work, by work.

    Of several candidates: the longest trajectory in the smallest micro batches, which fit most easily.
    """
    references: dict[str, RunSpec] = {}
    for spec in specs:
        if spec.is_certified and spec.script is None and unsupported(spec) is None:
            candidates = [reference_of(spec), *filter(None, [references.get(spec.work)])]
            smallest = min(reversed(candidates), key=lambda s: s.training.micro_batch)
            least = max(int(str(s.workload.options["least"])) for s in candidates)
            rounding = _more_rounding(candidates)
            workload = Choice("reference", {**smallest.workload.options, **rounding, "least": least})
            references[spec.work] = replace(smallest, workload=workload, steps=max(s.steps for s in candidates))
    return references


def reference_of(spec: RunSpec) -> RunSpec:
    """The plain training loop that does this spec's work on one process, in micro batches that surely fit."""
    length, own = spec.training.sequence_length, spec.training.micro_batch
    tokens = min(REFERENCE_TOKENS, REFERENCE_LOGIT_BYTES // (4 * load_shape(spec.model).vocab))
    fitting = [size for size in range(1, min(own, tokens // length) + 1) if own % size == 0]
    micro_batch = max(fitting, default=1)
    training = replace(
        spec.training,
        micro_batch=micro_batch,
        accumulation=spec.global_batch // micro_batch,
        compile=False,
        bucket_mb=None,
    )
    # In the first steps a fixed tolerance is right for fp32; later, differences of rounding have grown.
    variants = VARIANTS
    if training.precision.compute == "fp32":
        variants = 2 if spec.steps > FEW_STEPS else 1
    options: dict[str, int | float | str] = {"variants": variants, "least": min(spec.reference_steps, spec.steps)}
    options |= {"rounds_often": True} if rounds_often(spec) else {}
    options |= {"shared_words": str(layout_of(spec).tp)} if shares_words(spec) else {}
    options |= {"limit_gib": spec.proof.limit_gib} if spec.proof.limit_gib else {}
    launcher = spec.launcher
    if runs_here(spec):
        # On this host, options that change the arithmetic stay; those that divide the host among ranks do not.
        # Elsewhere the reference runs where the runs do: this host may not have their devices.
        launcher = Choice("local", {k: v for k, v in launcher.options.items() if k in ("threads", "warm")})
    return replace(
        spec,
        workload=Choice("reference", options),
        strategy=None,
        topology=Topology(device=spec.topology.device),
        training=training,
        launcher=launcher,
        timeout_s=spec.timeout_s * spec.topology.world_size * variants,
        warmup=WarmUp(),
        repeat=0,
        checkpoint_every=None,
        checkpoint_async=False,
        # A variable may change the arithmetic, so the reference runs without.
        env={},
    )


def _more_rounding(references: Sequence[RunSpec]) -> dict[str, str | bool]:
    """What the copies must imitate if one of these references needs it."""
    options = [reference.workload.options for reference in references]
    degrees = {int(part) for o in options for part in str(o.get("shared_words", "")).split("+") if part}
    rounding: dict[str, str | bool] = {"rounds_often": True} if any("rounds_often" in o for o in options) else {}
    return rounding | ({"shared_words": "+".join(map(str, sorted(degrees)))} if degrees else {})


def shares_words(spec: RunSpec) -> bool:
    """Whether ranks share the words of the output layer, and round their parts of its input's gradient to 16 bit."""
    return rounds_often(spec) and layout_of(spec).tp > 1


def rounds_often(spec: RunSpec) -> bool:
    """Whether an honest run rounds at more or other points than plain code, so that its reference's copies must, too.

    Ranks that share a sum (tensor parallelism) or a softmax (context parallelism) round their parts to 16 bit. Rounding
    to 8 bit turns a difference in the last of 16 bits, such as between two kernels, into one that is 16 times as large.
    """
    precision, layout = spec.training.precision, layout_of(spec)
    splits = layout.tp > 1 or layout.cp > 1
    return spec.tuning is None and (precision.is_8bit or (splits and precision.compute in ("bf16", "fp16")))


def unsupported(spec: RunSpec, *, anywhere: bool = False) -> str | None:
    """The first reason why this spec cannot run, by arithmetic alone; wrong options raise RequestError.

    anywhere: a reason that does not depend on this machine.
    """
    trains = (spec.is_certified and spec.script is None) or spec.checkpoint_every is None
    accepted = f"null for the workload {spec.workload.name}, which writes no checkpoints"
    require(trains, "checkpoint_every", spec.checkpoint_every, accepted)
    plugins = [("workloads", spec.workload), ("strategies", spec.strategy)]
    plugins += [] if anywhere else [("launchers", spec.launcher)]
    reasons = (load(kind, choice.name).check(spec) for kind, choice in plugins if choice is not None)
    return next((str(reason) for reason in reasons if reason), None)


def runs_here(spec: RunSpec) -> bool:
    """Whether the ranks are processes of this host."""
    return bool(getattr(load("launchers", spec.launcher.name), "HERE", False))
