"""OpenTelemetry: every measurement as a gauge, sent to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names."""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from paceline import __version__
from paceline.analysis.findings import Report
from paceline.errors import RequestError
from paceline.host.redirects import NoRedirects
from paceline.report.exporters import prometheus
from paceline.report.exporters._stream import StreamedPoint, StreamedRun
from paceline.report.exporters.prometheus import Family, metric_name

# The names and the default of the OpenTelemetry specification; metrics travel as OTLP/HTTP with JSON.
ENDPOINT, METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
DEFAULT = "http://127.0.0.1:4318"
TIMEOUT_S = 10.0
CUMULATIVE = 2


def check(directory: Path) -> None:
    """Reject an address that is none before anything is written."""
    address()


def address() -> str:
    """Where metrics are sent. It may contain a user and a password, so it is not repeated."""
    given = os.environ.get(METRICS_ENDPOINT) or os.environ.get(ENDPOINT, DEFAULT).rstrip("/") + "/v1/metrics"
    try:
        parts = urlsplit(given)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise RequestError(f"{ENDPOINT}: got another text, expected an address such as {DEFAULT}.")
    return given


def export(report: Report, directory: Path) -> list[Path]:
    send(prometheus.families(report), report.created_at)
    return []


def stream(directory: Path) -> OtlpStream:
    return OtlpStream()


class OtlpStream:
    """Sends gauges only: they contain step, loss and rate of every running run."""

    def write(self, run: StreamedRun, points: Sequence[StreamedPoint]) -> None: ...

    def gauges(self, families: Sequence[Family], at_s: float) -> None:
        send(families, at_s)

    def end(self, run: StreamedRun, is_ok: bool) -> None: ...

    def close(self) -> None: ...


def send(families: Iterable[Family], at_s: float) -> None:
    """One request; RequestError if the collector does not take it."""
    headers = {"Content-Type": "application/json", "User-Agent": f"paceline/{__version__}"}
    parts = urlsplit(address())
    user, at, host = parts.netloc.rpartition("@")
    if at:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
    for pair in filter(None, os.environ.get(HEADERS, "").split(",")):
        name, _, value = pair.partition("=")
        headers[name.strip()] = unquote(value.strip())
    body = json.dumps(document(families, at_s), allow_nan=False).encode()
    target, shown = (parts._replace(netloc=host, **more).geturl() for more in ({}, {"query": ""}))
    try:
        request = urllib.request.Request(target, data=body, headers=headers)
        with urllib.request.build_opener(NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        error.close()
        raise RequestError(f"otlp: {shown} answered {error.code}. Check address and headers.") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Other errors quote headers, and so a key.
        known = getattr(error, "reason", error)
        reason = str(known) if isinstance(known, OSError) else type(known).__name__
        raise RequestError(f"otlp: cannot send to {shown} ({reason}). Is the collector running?") from None


def document(families: Iterable[Family], at_s: float) -> dict[str, Any]:
    """An ExportMetricsServiceRequest as OTLP/JSON. Numbers that are not finite are left out."""
    metrics = []
    for family in families:
        points = [
            {
                "timeUnixNano": str(int(at_s * 1e9)),
                "asDouble": value,
                "attributes": [_attribute(name, text) for name, text in family.labels[key].items()],
            }
            for key, value in family.samples.items()
            if math.isfinite(value)
        ]
        data: dict[str, Any] = {"gauge": {"dataPoints": points}}
        if family.kind == "counter":
            data = {"sum": {"dataPoints": points, "aggregationTemporality": CUMULATIVE, "isMonotonic": True}}
        if points:
            metrics.append({"name": metric_name(family.name), "description": family.help, **data})
    resource = {"attributes": [_attribute("service.name", "paceline"), _attribute("service.version", __version__)]}
    scope = {"scope": {"name": "paceline", "version": __version__}, "metrics": metrics}
    return {"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}


def _attribute(name: str, text: str) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": text}}
