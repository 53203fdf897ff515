"""What `status` and `monitor` print: a results folder and a machine as they are at this moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from paceline import store
from paceline.errors import StoreError
from paceline.present.quantity import MISSING
from paceline.telemetry import DeviceSample, Snapshot

GIB = 2**30
# A rank that has not moved for this long is not called running (its controller would have ended it).
FRESH_S = 3600.0


def folder_lines(out: Path) -> tuple[list[str], bool]:
    """One line per experiment and per unfinished run, and whether anything is running."""
    lines, running = [], False
    for experiment in sorted({path.parent for path in store.run_dirs(out)}):
        open_runs, ended = [], Counter[str]()
        for run_dir in store.run_dirs(experiment):
            if store.is_sealed(run_dir):
                ended[_status(run_dir)] += 1
            else:
                open_runs.append(run_dir)
        counts = ", ".join(f"{count} {status}" for status, count in sorted(ended.items())) or "none ended"
        lines.append(f"{experiment}: {counts}" + (f", {len(open_runs)} not sealed" if open_runs else ""))
        for run_dir in open_runs:
            text, alive = _open_run(run_dir)
            running = running or alive
            lines.append(f"  {run_dir.name}: {text}")
    return lines or [f"{out}: no run yet"], running


def _status(run_dir: Path) -> str:
    try:
        return str(store.read_json(run_dir / "status.json").get("status"))
    except StoreError:
        return "damaged"


def _open_run(run_dir: Path) -> tuple[str, bool]:
    import psutil

    positions = store.read_progress(run_dir)
    if not positions:
        return "not started, or starting", False
    alive = any(psutil.pid_exists(p.pid) and time.time() - p.beat < FRESH_S for p in positions)
    where = "; ".join(f"rank {p.rank} at step {p.step} in {p.phase}" for p in positions[:8])
    return f"{'running' if alive else 'interrupted'}: {where}", alive


def snapshot_lines(snapshot: Snapshot) -> list[str]:
    """The host, then one line per GPU."""
    host = snapshot.host
    stamp = time.strftime("%H:%M:%S", time.localtime(host.at_s))
    shown = {
        "cpu": _text(host.cpu_ratio, "{:.0%}"),
        "memory": _gib(host.memory_used_bytes),
        "load": _text(host.load, "{:.1f}"),
    }
    return [f"{stamp} host  {_joined(shown)}", *(_device_line(device) for device in snapshot.devices)]


def _text(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def _gib(value: int | None) -> str:
    return MISSING if value is None else f"{value / GIB:.1f} GiB"


def _joined(shown: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {text}" for name, text in shown.items())


def _device_line(d: DeviceSample) -> str:
    shown = {
        "use": _text(d.utilisation_ratio, "{:.0%}"),
        "memory": _gib(d.memory_used_bytes),
        "power": _text(d.power_w, "{:.0f} W"),
        "temperature": _text(d.temperature_c, "{:.0f} C"),
        "clock": _text(d.sm_clock_hz and d.sm_clock_hz / 1e6, "{:.0f} MHz"),
        "throttled by": MISSING if d.throttle_reasons is None else ", ".join(d.throttle_reasons) or "nothing",
    }
    return f"         gpu {d.device}  {_joined(shown)}"
