"""Fit the prediction model to published rows, calibrate its intervals, and write the calibration page.

    python benchmarks/fit_prediction.py [--table benchmarks/data/training_throughput.csv] [--check]

Writes src/paceline/prediction/parameters.toml and the generated part of docs/prediction.md, in about three minutes.
`--check` writes nothing and prints the calibration. The rows are third-party measurements; none was made by Paceline,
and no run of docs/measured takes part in the fit.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.prediction import calibration, parameters, published
from paceline.prediction.calibration import ANCHORS, Choice, Score, source_of
from paceline.prediction.parameters import Fitted, Shared
from paceline.prediction.published import Row

TUNED_SOURCES = ("qwen-finetune", "seed-qlora")
ROOT = Path(__file__).parent.parent
TABLE = ROOT / "benchmarks" / "data" / "training_throughput.csv"
PAGE = ROOT / "docs" / "prediction.md"
START, END = "<!-- calibration: written by benchmarks/fit_prediction.py -->", "<!-- end of calibration -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    rows = calibration.usable(published.read(options.table))
    fitted, estimate = calibration.fit(rows)
    by_source = calibration.folds(rows, source_of, fitted.offset_sd)
    trained = {name: one for name, one in by_source.items() if name not in TUNED_SOURCES}
    tuned = {name: one for name, one in by_source.items() if name in TUNED_SOURCES}
    shared, trained = with_shared(rows, trained)
    fitted = replace(fitted, shared=shared)
    tuned = {name: replace(one, shared=shared) for name, one in tuned.items()}
    scale = scales(rows, trained)
    # Scores are kept by their factor, which is 1 here for both groups.
    _SCORED.clear()
    own = round(calibration.conformal(scored(rows, tuned, 0)) / scale[0], 3)
    _SCORED.clear()
    trained, tuned = ({k: replace(one, scale=scale, tuned_scale=own) for k, one in d.items()} for d in (trained, tuned))
    fitted = replace(fitted, scale=scale, tuned_scale=own, provenance=provenance(options.table, rows))
    text = page([row for row in rows if not calibration.is_tuned(row)], fitted, trained)
    _SCORED.clear()
    text = text.replace("### Leave one GPU", f"{tuned_text(rows, tuned)}\n\n### Leave one GPU")
    if options.check:
        sys.stdout.write(text)
        return 0
    parameters.PATH.write_text(parameters.text(fitted), encoding="utf-8")
    before, _, after = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(f"{before}{START}\n\n{text}\n{END}{after.partition(END)[2]}", encoding="utf-8")
    residual = np.median(np.abs(estimate.residuals))
    sys.stdout.write(f"{len(rows)} rows, median residual {residual:.3f}, scales {scale}\n")
    return 0


def provenance(table: Path, rows: Sequence[Row]) -> dict[str, object]:
    counts = collections.Counter(one.source for one in rows)
    return {
        "script": "benchmarks/fit_prediction.py",
        "version": "7",
        "table": table.name,
        "table_sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
        "rows": len(rows),
        "sources": [f"{name}: {count}" for name, count in counts.items()],
    }


def with_shared(rows: Sequence[Row], fits: dict[str, Fitted]) -> tuple[Shared, dict[str, Fitted]]:
    """What similar setups share, from all sources, and each fold with what the other sources show."""
    known: dict[tuple[str, tuple[int, ...]], float] = {}
    left = {
        name: calibration.left_out(fitted, [row for row in rows if source_of(row) == name])
        for name, fitted in fits.items()
    }
    everything = [one for group in left.values() for one in group]
    folds = {
        name: replace(
            fitted,
            shared=calibration.fit_shared([one for one in everything if not one.name.startswith(f"{name} ")], known),
        )
        for name, fitted in fits.items()
    }
    return calibration.fit_shared(everything, known), folds


def scales(rows: Sequence[Row], fits: dict[str, Fitted]) -> dict[int, float]:
    """The conformal factor for each number of anchors, over sources that were left out."""
    return {count: round(calibration.conformal(scored(rows, fits, count)), 3) for count in ANCHORS}


_SCORED: dict[tuple[int, float], list[Score]] = {}


def scored(rows: Sequence[Row], fits: dict[str, Fitted], count: int) -> list[Score]:
    """Every source predicted by the fit without it; kept, because several tables show it."""
    key = (count, next(iter(fits.values())).scale[count])
    if key in _SCORED:
        return _SCORED[key]
    found = _SCORED[key] = []
    for name, fitted in fits.items():
        one = calibration.score(name, fitted, [row for row in rows if source_of(row) == name], count)
        found += [one] if one else []
    return found


# --- the page ---


def tuned_text(rows: Sequence[Row], fits: dict[str, Fitted]) -> str:
    """The sources of fine-tuning programs, which have parameters and a factor of their own."""
    note = (
        "Plain fine-tuning programs (LoRA and QLoRA with transformers, PEFT and bitsandbytes) have three parameters "
        "and a conformal factor\nof their own, from two sources. They are not part of the other tables."
    )
    return f"{note}\n\n{source_table(rows, fits)}"


def page(rows: Sequence[Row], fitted: Fitted, by_source: dict[str, Fitted]) -> str:
    """The calibration tables in Markdown."""
    large = {
        (count, advised): small_to_large(rows, by_source, count, advised=advised)
        for count in ANCHORS
        for advised in ((False, True) if count else (False,))
    }
    blocks = [
        f"{len(rows)} rows of {len({source_of(one) for one in rows})} sources.",
        "### Leave one source out\n\n" + source_table(rows, by_source),
        "### Leave one GPU out\n\n" + group_table(rows, lambda one: one.setup.gpu.name, fitted, "GPU"),
        "### Leave the largest scale out\n\n" + largest_table(rows, fitted),
        "### From small to large\n\n" + scaling_table(rows, by_source, large),
        "From four rows, by source:\n\n" + large_table(large[4, False], large[4, True]),
        "### The choice of a layout, with no anchor\n\n" + choice_table(rows, by_source),
        "### Against the target\n\n" + target_table(rows, by_source, large[4, False], large[4, True]),
    ]
    return "\n\n".join(blocks) + "\n"


def source_table(rows: Sequence[Row], fits: dict[str, Fitted]) -> str:
    by_count = {count: {one.name: one for one in scored(rows, fits, count)} for count in ANCHORS}
    body = []
    for name in fits:
        scores = [by_count[count].get(name) for count in ANCHORS]
        body.append(
            [name, str(sum(source_of(row) == name for row in rows)), *(cell for one in scores for cell in cells(one))]
        )
    means = [mean_cells(list(by_count[count].values())) for count in ANCHORS]
    body.append(["**mean over sources**", "", *(cell for one in means for cell in one)])
    head = ["source", "rows"]
    for count in ANCHORS:
        word = "anchor" if count == 1 else "anchors"
        head += [f"{count} {word}: error median / p90, %", "coverage, %", "half-width, %"]
    return markdown(head, body)


def group_table(rows: Sequence[Row], key, fitted: Fitted, word: str) -> str:  # type: ignore[no-untyped-def]
    fits = calibration.folds(rows, key, fitted.offset_sd)
    body = []
    for name, one in fits.items():
        left = [row for row in rows if key(row) == name]
        scaled = replace(one, scale=fitted.scale, shared=fitted.shared)
        body.append([name, str(len(left)), *cells(calibration.score(name, scaled, left, 0))])
    return markdown([word, "rows", "error median / p90, %", "coverage, %", "half-width, %"], body)


def largest_table(rows: Sequence[Row], fitted: Fitted) -> str:
    key = calibration.largest_scale(rows)
    rest = [one for one in rows if key(one) == "rest"]
    left = [one for one in rows if key(one) == "largest"]
    trained, estimate = calibration.fit(rest, fitted.offset_sd)
    trained = replace(trained, scale=fitted.scale, shared=fitted.shared)
    body = []
    for name in dict.fromkeys(one.source for one in left):
        mine = [one for one in left if one.source == name]
        shifted = [one for one in rest if one.source == name]
        largest = max(one.setup.gpus for one in mine)
        body.append([name, str(len(mine)), str(largest), *cells(calibration.score(name, trained, mine, 0))])
        body[-1].append(anchored(trained, shifted, mine))
    del estimate
    head = ["source", "rows", "GPUs", "error median / p90, %", "coverage, %", "half-width, %", "with 4 smaller rows, %"]
    return markdown(head, body)


def anchored(fitted: Fitted, smaller: Sequence[Row], larger: Sequence[Row]) -> str:
    one = calibration.to_larger(fitted, smaller, larger, 4)
    return percents(one) if one else ""


def scaling_table(rows: Sequence[Row], fits: dict[str, Fitted], large: dict[tuple[int, bool], list[Score]]) -> str:
    body = []
    for count in ANCHORS:
        found = large[count, False]
        many = "row" if count == 1 else "rows"
        what = f"128 GPUs or more from {count} {many} at 64 or fewer"
        body.append(
            [what + (", drawn at random" if count else ""), str(sum(one.rows for one in found)), *pooled(found)]
        )
        if count:
            found = large[count, True]
            body.append([what + ", as advised", str(sum(one.rows for one in found)), *pooled(found)])
    series = calibration.series_score(fits, rows)
    if series is not None:
        body.append(["every larger scale of a series from its smallest (1 anchor)", str(series.rows), *cells(series)])
    return markdown(["what", "rows", "error median / p90, %", "coverage, %", "half-width, %"], body)


def small_to_large(rows: Sequence[Row], fits: dict[str, Fitted], count: int, *, advised: bool = False) -> list[Score]:
    found = []
    for name, fitted in fits.items():
        mine = [row for row in rows if source_of(row) == name]
        one = calibration.small_to_large(name, fitted, mine, count, advised=advised)
        found += [one] if one else []
    return found


def large_table(drawn: Sequence[Score], chosen: Sequence[Score]) -> str:
    """By source: 128 GPUs or more from four smaller rows, drawn at random or as advised."""
    body = [[one.name, str(one.rows), *cells(one), *cells(other)] for one, other in zip(drawn, chosen, strict=True)]
    head = ["source", "rows"]
    for how in ("at random", "as advised"):
        head += [f"{how}: error median / p90, %", "coverage, %", "half-width, %"]
    return markdown(head, body)


def choices(rows: Sequence[Row], fits: dict[str, Fitted]) -> list[Choice]:
    found = []
    for name, fitted in fits.items():
        one = calibration.choice(name, fitted, [row for row in rows if source_of(row) == name])
        found += [one] if one else []
    return found


def choice_table(rows: Sequence[Row], fits: dict[str, Fitted]) -> str:
    found = choices(rows, fits)
    body = [
        [
            one.name,
            str(one.groups),
            f"{100 * one.right:.0f} of {one.pairs}",
            f"{100 * one.regret:.1f}",
            f"{100 * one.random:.1f}",
        ]
        for one in found
    ]
    means = [100 * float(np.mean([getattr(one, name) for one in found])) for name in ("right", "regret", "random")]
    body.append(["**mean over sources**", "", f"{means[0]:.0f}", f"{means[1]:.1f}", f"{means[2]:.1f}"])
    head = [
        "source",
        "groups",
        "pairs ordered right, %",
        "throughput lost by the predicted best, %",
        "by a random pick, %",
    ]
    return markdown(head, body)


def target_table(rows: Sequence[Row], fits: dict[str, Fitted], drawn: Sequence[Score], chosen: Sequence[Score]) -> str:
    """The accuracy that was asked for, and what these rows show."""
    zero = {one.name: one for one in scored(rows, fits, 0)}
    four = scored(rows, fits, 4)
    megatron = [zero[name] for name in ("korthikanti-2022", "megatron-lm-2020") if name in zero]
    unseen = [zero[name] for name in ("internevo", "torchtitan") if name in zero]
    rest = [one for name, one in zero.items() if one not in megatron + unseen]
    series = calibration.series_score(fits, rows)
    picks = choices(rows, fits)
    everyone = list(zero.values())
    worst = [one.name for one in picks if one.regret > one.random]
    lossy = [one for one in picks if one.random >= 0.1]
    regret = float(np.mean([one.regret for one in lossy])) if lossy else float("nan")

    def met(one: Score | None, median: float, p90: float) -> str:
        return "yes" if one and one.median <= median and one.p90 <= p90 else "no"

    body = []
    for what, scores, median, p90 in (
        ("zero-shot, A100 Megatron-style (korthikanti-2022, megatron-lm-2020)", megatron, 6, 18),
        ("zero-shot, unseen framework with a scaling series (internevo, torchtitan)", unseen, 12, 45),
        ("zero-shot, all other sources", rest, 15, 35),
        ("1 small anchor of the same series", [series] if series else [], 10, 35),
        ("4 anchors of the same source", four, 5, 18),
        ("4 anchors at 8 to 64 GPUs drawn at random, predicted at 128 or more", drawn, 3, 15),
        ("4 anchors at 8 to 64 GPUs as advised, predicted at 128 or more", chosen, 3, 15),
    ):
        one = merged(scores)
        body.append([what, f"{median} / {p90}", percents(one) if one else "", met(one, median / 100, p90 / 100)])
    for count, scores, limit in ((0, everyone, 30), (4, four, 15)):
        coverage = 100 * float(np.mean([one.coverage for one in scores]))
        half = 100 * float(np.mean([one.half_width for one in scores]))
        answer = "yes" if 85 <= coverage <= 95 and half <= limit else "no"
        body.append(
            [
                f"coverage and half-width with {count} anchors",
                f"85 to 95; {limit}",
                f"{coverage:.0f}; {half:.1f}",
                answer,
            ]
        )
    body.append(
        [
            "mean regret where a random pick loses 10 % or more",
            "3",
            f"{100 * regret:.1f}",
            "yes" if regret <= 0.03 else "no",
        ]
    )
    body.append(
        [
            "sources where the choice is worse than a random pick",
            "none",
            ", ".join(worst) or "none",
            "no" if worst else "yes",
        ]
    )
    return markdown(["what", "target, %", "reached, %", "met"], body)


def merged(scores: Sequence[Score]) -> Score | None:
    """All rows of several sources as one score."""
    if not scores:
        return None
    names = ("errors", "covered", "half_widths", "log_ratios", "sds")
    joined = {name: np.concatenate([getattr(one, name) for one in scores]) for name in names}
    return replace(scores[0], rows=sum(one.rows for one in scores), **joined)


def pooled(scores: Sequence[Score]) -> list[str]:
    return cells(merged(scores))


def percents(one: Score) -> str:
    return f"{100 * one.median:.1f} / {100 * one.p90:.1f}"


def cells(one: Score | None) -> list[str]:
    return ["", "", ""] if one is None else [percents(one), f"{100 * one.coverage:.0f}", f"{100 * one.half_width:.0f}"]


def mean_cells(scores: Sequence[Score]) -> list[str]:
    values = [
        100 * float(np.mean([getattr(one, name) for one in scores]))
        for name in ("median", "p90", "coverage", "half_width")
    ]
    return [f"{values[0]:.1f} / {values[1]:.1f}", f"{values[2]:.0f}", f"{values[3]:.0f}"]


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
