"""Published tables imported as run directories: claims, which are never ranked, compared or recommended.

The table is a CSV file with one row per run. A claimed run is sealed with the status `claimed`. It has the numbers of
its source and no sample, outcome, machine or certificate, because it did not run here.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import RequestError, require
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training
from paceline.host.files import document_of
from paceline.results import store
from paceline.results.records import ClaimSample, Status

TEXTS = ("source", "strategy", "model", "gpu")
COUNTS = ("world_size", "sequence_length", "micro_batch")
OPTIONAL_COUNTS = ("nodes", "accumulation")
NUMBERS = (
    *("tokens_per_s", "step_time_s", "peak_memory_bytes", "scaling_efficiency_ratio"),
    *("usd_per_gpu_hour", "tokens_per_usd", "relative_cost_ratio"),
    *("wire_parameters", "wire_bytes_per_parameter", "link_bytes_per_s"),
)
COLUMNS = (*TEXTS, *COUNTS, *OPTIONAL_COUNTS, "precision", *NUMBERS)


def import_table(path: Path, out: Path) -> tuple[Path, int]:
    """Write one run directory per row below `out`; returns the directory of the experiment and the number of runs.

    The whole table is checked before anything is written.
    """
    rows = _read(path)
    experiment = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.") or "claimed"
    parsed = [(_spec(where, row, experiment), _claims(where, row)) for where, row in rows]
    seen: dict[str, str] = {}
    for (where, _), (spec, _) in zip(rows, parsed, strict=True):
        known = seen.setdefault(spec.run_id, where)
        require(known == where, where, f"the run of {known}", "every run once")
    stated_at = path.stat().st_mtime
    for spec, claims in parsed:
        run_dir = store.create(out, spec)
        (run_dir / "samples-0.jsonl").write_text("".join(map(store.sample_line, claims)), encoding="utf-8")
        why = f"claimed by {claims[0].source}, not measured: no samples, no interval, no certificate"
        store.seal(run_dir, Status.CLAIMED, why, stated_at, stated_at)
    return out / experiment, len(parsed)


def _read(path: Path) -> list[tuple[str, Mapping[str, str]]]:
    """Rows with their position in the file; lines that start with # are comments."""
    try:
        lines = document_of(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(
            f"import: got {str(path)!r}, which cannot be read ({reason}), expected a CSV file."
        ) from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    table = list(csv.reader(line for _, line in numbered))
    header = table[0] if table else []
    unknown = [name for name in header if name not in COLUMNS]
    needed = (*TEXTS, *COUNTS, "tokens_per_s")
    complete = set(needed) <= set(header) and len(set(header)) == len(header)
    require(not unknown, f"{path}, columns", ", ".join(unknown), ", ".join(COLUMNS))
    require(complete, f"{path}, columns", header, f"each once: {', '.join(needed)}")
    rows: list[tuple[str, Mapping[str, str]]] = []
    for (number, _), cells in zip(numbered[1:], table[1:], strict=True):
        where = f"{path}, line {number}"
        require(len(cells) == len(header), where, f"{len(cells)} cells", f"{len(header)}, as in the header")
        rows.append((where, {name: cell.strip() for name, cell in zip(header, cells, strict=True)}))
    require(bool(rows), str(path), "no row", "a header and one row or more")
    return rows


def _spec(where: str, row: Mapping[str, str], experiment: str) -> RunSpec:
    """The run that the row describes. Fields that a row cannot state keep their defaults and are not shown."""
    for name in TEXTS:
        require(bool(row[name]), f"{where}, {name}", row[name], "text")
    counts = {name: _count(where, name, row[name]) for name in COUNTS}
    counts |= {name: _count(where, name, row.get(name) or "1") for name in OPTIONAL_COUNTS}
    nodes, size = counts["nodes"], counts["world_size"]
    require(size % nodes == 0, f"{where}, nodes", nodes, f"a divisor of the world size {size}")
    compute = row.get("precision") or "fp32"
    try:
        precision = Precision(compute=compute, reduce=compute)
        strategy = Choice.parse(row["strategy"])
    except RequestError as error:
        raise RequestError(f"{where}, {error}") from None
    return RunSpec(
        experiment=experiment,
        workload=Choice("claimed", {"gpu": row["gpu"]}),
        launcher=Choice("elsewhere"),
        strategy=strategy,
        model=Choice(row["model"]),
        topology=Topology(device="cuda", nodes=nodes, processes_per_node=size // nodes),
        training=Training(
            sequence_length=counts["sequence_length"],
            micro_batch=counts["micro_batch"],
            accumulation=counts["accumulation"],
            precision=precision,
        ),
        steps=1,
    )


def _count(where: str, name: str, text: str) -> int:
    require(text.isascii() and text.isdecimal() and int(text) >= 1, f"{where}, {name}", text, "a whole number from 1")
    return int(text)


def _claims(where: str, row: Mapping[str, str]) -> Sequence[ClaimSample]:
    """Every number of the row; empty cells are skipped. accumulation is included if the row states it."""
    stated = {name: row[name] for name in (*NUMBERS, "accumulation") if row.get(name)}
    require("tokens_per_s" in stated, f"{where}, tokens_per_s", row["tokens_per_s"], "a positive number")
    claims = []
    for name, text in stated.items():
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        require(0 < value < math.inf, f"{where}, {name}", text, "a positive number")
        claims.append(ClaimSample(rank=0, metric=name, value=value, source=row["source"]))
    return claims
