"""/metrics for Prometheus: gauges of this machine, and the campaigns of a results directory."""

from __future__ import annotations

import contextlib
import hmac
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from paceline.campaign.live.local_server import LocalServer, is_loopback, is_own_host, parse_address
from paceline.campaign.live.nodes import Look, Watches
from paceline.campaign.live.progress import title
from paceline.errors import RequestError, Scalar
from paceline.host.gauges import Snapshot
from paceline.report.exporters.prometheus import CONTENT_TYPE, Family, render
from paceline.results.campaign_file import CampaignView

# The variable with the token that readers of the metrics must send; needed where other hosts can connect.
TOKEN = "PACELINE_METRICS_TOKEN"
HOST_GAUGES = {
    "cpu_ratio": "Busy share of all cores since the previous reading.",
    "memory_used_bytes": "Memory of the host in use.",
    "memory_total_bytes": "Memory of the host.",
    "load": "Runnable processes, averaged over a minute.",
    "frequency_hz": "Mean clock of the cores.",
    "temperature_c": "Hottest sensor of the processor.",
}
GPU_GAUGES = {
    "utilisation_ratio": "Busy share reported by the driver.",
    "memory_used_bytes": "Memory of the GPU in use.",
    "memory_total_bytes": "Memory of the GPU.",
    "power_w": "Power drawn.",
    "temperature_c": "Temperature of the GPU.",
    "sm_clock_hz": "Clock of the multiprocessors.",
    "memory_clock_hz": "Clock of the memory.",
}
# Field of a `Pulse` -> name and description of its metric.
RUN_GAUGES = {
    "step": ("run_step", "Step of the rank furthest behind, from 0."),
    "steps": ("run_steps", "Steps that were requested."),
    "tokens_per_s": ("run_tokens_per_s", "Tokens per second of all ranks over the last few steps; no measurement."),
    "peak_bytes": ("run_peak_memory_bytes", "Peak memory of any rank so far."),
    "loss": ("run_loss", "Last loss of rank 0, in nats."),
    "beat": ("run_beat_timestamp_seconds", "When a rank last moved, in seconds since 1970."),
    "step_s": ("run_step_time_seconds", "Mean duration of the last few steps of rank 0."),
}
# The same of a `NodeReading` and of a `GpuReading`.
NODE_GAUGES = {
    "age_s": ("run_node_age_seconds", "Time since the last reading of the node arrived."),
    "cpu_ratio": ("run_node_cpu_ratio", "Busy share of all cores of the node."),
    "memory_used_bytes": ("run_node_memory_used_bytes", "Memory of the node in use."),
    "received_per_s": ("run_node_received_bytes_per_s", "Network traffic to the node, RDMA included."),
    "sent_per_s": ("run_node_sent_bytes_per_s", "Network traffic from the node, RDMA included."),
}
DEVICE_GAUGES = {name: (f"run_gpu_{name}", text) for name, text in GPU_GAUGES.items() if name != "memory_total_bytes"}


@contextlib.contextmanager
def serving(address: str, page: Callable[[], str]) -> Iterator[str]:
    """Serve `page()` at /metrics in threads until the block ends; yields the address."""
    host, port = parse_address(address)
    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(host):
        raise RequestError(
            f"--serve: got {address!r}, which other hosts can reach, expected a loopback address, or a token in the "
            f"variable {TOKEN}. Prometheus sends it as `authorization: {{credentials: ...}}`."
        )
    try:
        server = _server(host, port, page, token)
    except OSError as error:
        raise RequestError(
            f"--serve: cannot listen on {address!r} ({error.strerror}). Choose another address."
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="paceline-metrics", daemon=True)
    thread.start()
    try:
        yield f"{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _server(host: str, port: int, page: Callable[[], str], token: str) -> LocalServer:
    class MetricsPage(BaseHTTPRequestHandler):
        # A client that connects and sends nothing must not occupy a thread forever.
        timeout = 10

        def do_GET(self) -> None:
            self.wfile.write(self._begin())

        def do_HEAD(self) -> None:
            self._begin()

        def _begin(self) -> bytes:
            """Send the header and return the body."""
            server.has_request(self.connection)
            # Without a token, a page of another site could read this one by DNS rebinding. Every browser sends a Host.
            named = self.headers.get("Host")
            if not token and named is not None and not is_own_host(named, host):
                self.send_error(421, "the Host header names another server")
                return b""
            given = self.headers.get("Authorization", "").encode(errors="replace")
            if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                self.send_error(401, "a token is needed")
                return b""
            known = self.path.partition("?")[0] == "/metrics"
            body = (page() if known else "paceline: the metrics are at /metrics\n").encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", CONTENT_TYPE if known else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            return body

        def log_message(self, format: str, *args: object) -> None:
            """Do not log scrapes: they come every few seconds."""

    server = LocalServer(host, port, MetricsPage)
    return server


def page_text(
    snapshot: Snapshot | None,
    views: Sequence[CampaignView] = (),
    out: Path | None = None,
    watches: Watches | None = None,
) -> str:
    """The metrics of a reading and of campaigns. The views are of experiments at or below `out`; those that run are
    looked at through `watches`, node by node."""
    named = named_views(views, out)
    looks = watches.looks(named) if watches else {}
    return render([*machine_families(snapshot), *campaign_families(named), *node_families(looks)])


def named_views(views: Sequence[CampaignView], out: Path | None) -> dict[str, CampaignView]:
    """By the path below `out`: two directories may contain experiments of the same name."""
    named = {}
    for view in views:
        inner = view.experiment.relative_to(out).as_posix() if out is not None else "."
        named[view.experiment.resolve().name if inner == "." else inner] = view
    return named


def node_families(looks: Mapping[str, Look]) -> list[Family]:
    """Per node and GPU of every running run, and its straggler."""
    of_nodes = {name: Family(*about) for name, about in NODE_GAUGES.items()}
    of_gpus = {name: Family(*about) for name, about in DEVICE_GAUGES.items()}
    energy = Family("run_gpu_energy_joules_total", "Energy since the driver was loaded.", "counter")
    throttled = Family("run_gpu_throttled", "1 for each reason why the GPU runs slower than it could.")
    straggler = Family("run_straggler", "1 for the rank that most looks found to be last.")
    for experiment, look in looks.items():
        labels: dict[str, Scalar] = {"experiment": experiment, "run": look.pulse.spec.run_id}
        if look.straggler:
            straggler.add(1, {**labels, "rank": look.straggler.rank, "node": look.straggler.host})
        for node in look.nodes:
            own = {**labels, "node": node.host}
            for name, family in of_nodes.items():
                family.add(getattr(node, name), own)
            for index, gpu in enumerate(node.gpus):
                device = {**own, "gpu": index}
                for name, family in of_gpus.items():
                    family.add(getattr(gpu, name), device)
                energy.add(gpu.energy_j, device)
                for reason in gpu.throttle_reasons or ():
                    throttled.add(1, {**device, "reason": reason})
    return [*of_nodes.values(), *of_gpus.values(), energy, throttled, straggler]


def machine_families(snapshot: Snapshot | None) -> list[Family]:
    """Metrics of host and GPUs; none before the first reading."""
    if snapshot is None:
        return []
    host = {name: Family(f"host_{name}", text) for name, text in HOST_GAUGES.items()}
    for name, family in host.items():
        family.add(getattr(snapshot.host, name))
    energy = Family("host_energy_joules_total", "Energy of the processors since the first reading.", "counter")
    energy.add(snapshot.host.energy_j)
    cores = Family("host_core_ratio", "Busy share of one core since the previous reading.")
    for number, ratio in enumerate(snapshot.host.cores_ratio or ()):
        cores.add(ratio, {"core": number})
    read = Family("reading_timestamp_seconds", "When the gauges were read, in seconds since 1970.")
    read.add(snapshot.host.at_s)
    gpus = {name: Family(f"gpu_{name}", text) for name, text in GPU_GAUGES.items()}
    gpu_energy = Family("gpu_energy_joules_total", "Energy since the driver was loaded.", "counter")
    throttled = Family("gpu_throttled", "1 for each reason why the GPU runs slower than it could.")
    for device in snapshot.devices:
        labels: dict[str, Scalar] = {"gpu": device.device}
        for name, family in gpus.items():
            family.add(getattr(device, name), labels)
        gpu_energy.add(device.energy_j, labels)
        for reason in device.throttle_reasons or ():
            throttled.add(1, {**labels, "reason": reason})
    return [*host.values(), energy, cores, *gpus.values(), gpu_energy, throttled, read]


def campaign_families(views: Mapping[str, CampaignView]) -> list[Family]:
    """Per experiment: planned and ended runs. Per running run: step, rate, memory and loss."""
    ended = Family("campaign_runs_ended", "Runs that ended, by status.")
    planned = Family("campaign_runs_planned", "Runs of the plan, references included.")
    running = Family("campaign_running", "1 while a controller is running, else 0.")
    left = Family("campaign_left_seconds", "Expected time to the end of the plan.")
    of_runs = {name: Family(*about) for name, about in RUN_GAUGES.items()}
    for experiment, view in views.items():
        labels: dict[str, Scalar] = {"experiment": experiment}
        for status, count in view.ended.items():
            ended.add(count, {**labels, "status": status})
        planned.add(view.planned, labels)
        running.add(view.running, labels)
        left.add(view.left_s, labels)
        for pulse in view.pulses:
            spec = pulse.spec
            about = {"run": spec.run_id, "cell": spec.cell, "title": title(spec)}
            for name, family in of_runs.items():
                family.add(getattr(pulse, name), {**labels, **about})
    return [planned, ended, running, left, *of_runs.values()]
