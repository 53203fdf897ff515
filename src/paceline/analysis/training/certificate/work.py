"""The same start, data and amount of work: weights, token ids, counts of tokens, steps and micro batches."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial

from paceline.analysis.findings import Check
from paceline.analysis.training.certificate.arithmetic import _operations
from paceline.analysis.training.certificate.observed import (
    Observed,
    ProofGroup,
    Standard,
    averages_every,
    checked,
    on_ranks,
    silent_ranks,
    steps_text,
    trained_count,
)
from paceline.errors import RequestError
from paceline.models import parallel

# Adam moves a tensor without signal by noise of the same size, so honest runs agree within a few per cent.
MOVEMENT_FACTOR = 1.15


def frozen_weights(run: Observed, standard: Standard) -> Check | None:
    """The hash covers 4-bit codes and their scales as every rank stores them."""
    if run.spec.tuning is None or not run.spec.tuning.has_adapters:
        return None
    source = standard.reference or run
    wanted = source.evidence[0].frozen_digest if 0 in source.evidence else None
    problems = silent_ranks(run)
    problems += [f"{e.frozen_digest} on rank {r}" for r, e in run.evidence.items() if e.frozen_digest != wanted]
    problems = problems if wanted else ["no hash of the frozen weights"]
    seen = on_ranks(run.evidence)
    return checked("frozen weights", f"hash {wanted} on every rank", problems, seen)


def label_tokens(run: Observed, standard: Standard) -> Check | None:
    """Trained tokens of the global batch: the loss is their mean, so another count is another loss."""
    if run.spec.tuning is None or standard.reference is None:
        return None
    seen, known = _sums(run), _sums(standard.reference)
    problems = [f"{n} at step {step}" for step, n in seen.items() if step in known and n != known[step]]
    problems = problems if seen else ["no step was recorded"]
    common = sum(step in known for step in seen)
    return checked("learned tokens per step", "the reference's", problems, f"equal at {common} steps")


def _sums(run: Observed) -> dict[int, int | None]:
    ranks = run.by_step("label_tokens")
    return {step: None if None in counts else sum(counts) for step, counts in ranks.items()}


def moved(run: Observed, standard: Standard) -> Check | None:
    """Every trainable tensor changed about as much as in the reference, and no frozen weight changed.

    Only tensors stored in fp32 are compared: a 16-bit copy may stay the same while its master weight changes. Adam's
    steps hardly depend on the size of a gradient, so a tensor that moved much less missed updates or had another
    learning rate. The comparison needs a reference of as many steps; without one, every tensor must have changed. A run
    that was proved on less is compared with other configurations, one that approximates gradients with nothing.
    """
    tuning = run.spec.tuning
    frozen = [
        f"frozen weights changed on rank {r}"
        for r, e in run.evidence.items()
        if e.frozen_digest and e.final_frozen_digest and e.final_frozen_digest != e.frozen_digest
    ]
    old = [
        f"{len(e.unmoved)} did not change on rank {r}, first {e.unmoved[0]}"
        for r, e in run.evidence.items()
        if e.unmoved
    ]
    own = _movements(run)
    adapted = tuning is not None and tuning.has_adapters
    if not own and not (adapted and any(e.unmoved is not None for e in run.evidence.values())):
        return None
    reference = standard.reference
    known = _movements(reference) if reference and len(reference.steps) == len(run.steps) else None
    source = "the reference"
    if standard.proof is not None:
        known, source = _movements_of_others(run, standard), "other configurations"
    if run.spec.approximation is not None:
        known = None
    problems = [*frozen, *old]
    for name, change in (own or {}).items():
        wanted = (known or {}).get(name)
        if change == 0 and (wanted is None or wanted > 0):
            problems.append(f"{name} did not change")
        elif wanted and not 1 / MOVEMENT_FACTOR <= change / wanted <= MOVEMENT_FACTOR:
            problems.append(f"{name} changed {change / wanted:.2g} times as much as in {source}")
    expected = "every trainable tensor changed"
    expected += f", within a factor of {MOVEMENT_FACTOR:g} of {source}" if known else ""
    expected += ", no frozen weight did" if adapted else ""
    return checked("weights moved", expected, problems, f"{len(own or {})} tensors" if own else "every adapter")


def _movements(run: Observed) -> Mapping[str, float] | None:
    return run.evidence[0].movements if 0 in run.evidence else None


def _movements_of_others(run: Observed, standard: Standard) -> Mapping[str, float] | None:
    """By tensor, the median over all configurations with as many steps, or that of the other one if there are two."""
    found: dict[str, Mapping[str, float]] = {}
    for peer in standard.group:
        if len(peer.steps) == len(run.steps) and peer.spec.approximation is None and (moved := _movements(peer)):
            found.setdefault(peer.spec.cell, moved)
    others = [moved for cell, moved in found.items() if cell != run.spec.cell or len(found) > 2]
    names = dict.fromkeys(name for moved in others for name in moved)
    return {name: statistics.median(moved[name] for moved in others if name in moved) for name in names} or None


def ranks_agree(run: Observed, standard: Standard) -> Check | None:
    """After the window every rank has the same weights: gradients that were not reduced make them differ. Of a strategy
    that averages weights, if it ends with an average."""
    digests = {rank: e.final_digests for rank, e in run.evidence.items() if e.final_digests is not None}
    if not digests or run.spec.topology.world_size == 1 or run.spec.steps % averages_every(run):
        return None
    first = digests[min(digests)]
    problems = silent_ranks(run)
    for rank, other in digests.items():
        differing = [name for name, digest in other.items() if first.get(name) != digest]
        if differing:
            problems.append(f"{len(differing)} tensors differ on rank {rank}, first {differing[0]}")
    seen = on_ranks(digests)
    return checked("weights after the window", "the same on every rank", problems, seen)


def completed_reference(run: Observed, standard: Standard) -> Check:
    if standard.proof is not None:
        return _proved(run, standard.proof)
    problems = [standard.missing] if standard.missing else []
    seen = f"{standard.reference.run}, {len(standard.reference.steps)} steps" if standard.reference else ""
    return checked("reference", "a completed one-process reference of the same work", problems, seen)


def _proved(run: Observed, proof: ProofGroup) -> Check:
    """The same configuration of the reduced form did the same work as one process."""
    found = proof.certificate_of(run.spec)
    expected = f"this configuration certified against one process on {proof.reduction.text}"
    if found is None:
        return checked("proof", expected, ["no run of the proof group has this configuration"], "")
    problems = [f"{found.run}: {reason}" for reason in found.reasons]
    return checked("proof", expected, problems, f"{found.run}, {found.steps} steps")


def initial_weights(run: Observed, standard: Standard) -> Check:
    """Without a reference, the weights of most runs of the work."""
    expected = standard.reference.evidence[0] if standard.reference else run.evidence.get(0)
    if expected is None:
        return checked("initial weights", "a hash of the weights on every rank", silent_ranks(run), "")
    problems = silent_ranks(run)
    for rank, seen in run.evidence.items():
        if seen.init_digest != expected.init_digest:
            differing = [k for k, v in seen.init_digests.items() if expected.init_digests.get(k, v) != v]
            where = f" (first differing: {differing[0]})" if differing else ""
            problems.append(f"{seen.init_digest} on rank {rank}{where}")
    if standard.proof is not None:
        votes = Counter(peer.evidence[0].init_digest for peer in standard.group if 0 in peer.evidence)
        others = [digest for digest in votes if digest != expected.init_digest]
        if any(votes[digest] >= votes[expected.init_digest] for digest in others):
            most = max(others, key=lambda digest: votes[digest])
            problems.append(f"{votes[most]} of {votes.total()} runs of this work began with {most}")
    return checked("initial weights", f"hash {expected.init_digest} on every rank", problems, on_ranks(run.evidence))


def parameter_count(run: Observed, standard: Standard) -> Check:
    """(7) of method.md section 6: the count in the process equals what the configuration implies."""
    wanted: dict[str, int] = {}
    with contextlib.suppress(RequestError):
        wanted["the configuration"] = trained_count(run)
    if standard.reference:
        wanted["the reference"] = standard.reference.evidence[0].parameters
    seen = {e.parameters for e in run.evidence.values()}
    problems = [f"{n:,}" for n in sorted(seen) if any(n != w for w in wanted.values())]
    expected = ", ".join(f"{count:,} by {source}" for source, count in wanted.items()) or "one count on all ranks"
    if not seen or (not problems and len(seen) > 1):
        problems = [" and ".join(f"{n:,}" for n in sorted(seen)) or "no count"]
    return checked("parameters", expected, problems, ", ".join(f"{n:,}" for n in sorted(seen)))


def data_digests(run: Observed, standard: Standard) -> Check:
    """The reference computes the digests of all steps from the seed. Where an old one did not, most runs must agree."""
    known: dict[int, int] = {}
    if standard.proof is not None:
        known = dict(enumerate(standard.proof.reference.evidence[0].whole_digests or ()))
    if standard.reference:
        later = standard.reference.evidence[0].later_digests or ()
        known = {**standard.reference.digests, **dict(enumerate(later, max(standard.reference.steps) + 1))}
    common = [step for step in run.digests if step in known]
    other = [step for step in common if run.digests[step] != known[step]]
    disputed = []
    for step, digest in run.digests.items():
        if step in known:
            continue
        votes = standard.once(("votes", step), partial(_votes, standard, step))
        if any(votes[seen] >= votes[digest] for seen in votes if seen != digest):
            disputed.append(step)
    source = "the reference" if standard.reference else "the seed gives"
    problems = [f"other token ids than {source} at {steps_text(other)}"] if other else []
    problems += [f"other token ids than most of the group at {steps_text(disputed)}"] if disputed else []
    if not common and standard.reference:
        problems.append("no step in common with the reference")
    rest = len(run.digests) - len(common)
    if standard.proof is not None:
        seen = f"as computed from the seed at {len(common)} steps" + (f", equal to the group at {rest}" if rest else "")
        expected = "the token ids that the seed gives, and of most runs of this work, at every step"
        return checked("data", expected, problems, seen)
    seen = f"equal to the reference at {len(common)} steps" + (f", to the group at {rest}" if rest else "")
    return checked("data", "the token ids of the reference at every step", problems, seen)


def _votes(standard: Standard, step: int) -> Counter[int]:
    """How many runs of the group have each digest at this step."""
    return Counter(peer.digests[step] for peer in standard.group if step in peer.digests)


def tokens_per_step(run: Observed, standard: Standard) -> Check:
    """The whole global batch, or what the reference counted if its data has padding."""
    whole = run.spec.tokens_per_step
    known = standard.reference.tokens if standard.reference else {}
    padded = any(tokens < whole for tokens in known.values())
    seen = run.tokens
    problems = [
        f"{tokens:,} at step {step}"
        for step, tokens in seen.items()
        if (tokens > whole or known.get(step, tokens) != tokens if padded else tokens != whole)
    ]
    problems = problems if seen else ["no step was recorded"]
    expected = f"the reference's non-pad tokens, at most {whole:,}" if padded else f"{whole:,}"
    return checked("tokens per optimizer step", expected, problems, f"as expected at all {len(seen)} steps")


def optimizer_steps(run: Observed, standard: Standard) -> Check:
    """Every rank records every step, and every step updates the weights once.

    In fp16 a step whose gradients overflow is skipped by design: accepted if no rank has a finite norm there.
    """
    wanted = run.spec.steps
    per_rank = run.table.counts("rank")
    ranks = range(run.spec.topology.world_size)
    problems = [f"{per_rank.get(r, 0)} steps on rank {r}" for r in ranks if per_rank.get(r) != wanted]
    fp16 = run.spec.training.precision.compute == "fp16"
    wrong: defaultdict[int, list[int]] = defaultdict(list)
    if run.table.counts("updates").keys() != {1}:
        for step, seen in run.by_step("updates").items():
            overflow = fp16 and all(norm is None for norm in run.table.at(step, "grad_norm"))
            for updates in {*seen} - ({0, 1} if overflow else {1}):
                wrong[updates].append(step)
    problems += [f"{updates} updates at {steps_text(steps)}" for updates, steps in sorted(wrong.items())]
    return checked("optimizer steps", f"{wanted} steps of 1 update each", problems, f"{wanted} steps of 1 update each")


def micro_batches(run: Observed, standard: Standard) -> Check:
    """As the loop counted them, and as token ids were looked up in the embedding on audited steps."""
    training, layout = run.spec.training, run.layout
    wanted, positions = training.accumulation, training.micro_batch * training.sequence_length
    passes = parallel.micro_batches(layout, training)
    seen = run.table.counts("micro_batches")
    total = sum(seen.values())
    problems = [f"{count} on {times} of {total} rank-steps" for count, times in seen.items() if count != wanted]
    problems = problems if seen else ["no step was recorded"]
    looked_up = _operations(run, "embedding")
    for (rank, step), counts in looked_up.items():
        calls, ids = sum(c for c, _ in counts.values()), sum(w for _, w in counts.values())
        # Only the first stage of a pipeline looks up ids, and each rank its part of the sequence.
        mine = (passes, wanted * positions // layout.cp) if layout.has_first(rank) else (0, 0)
        if (calls, ids) != mine:
            problems.append(f"{calls} forward passes over {ids:,} positions on rank {rank} at step {step}")
    expected = f"{wanted} of {positions:,} positions on every rank"
    return checked("micro batches per step", expected, problems, f"{wanted} on every rank")
