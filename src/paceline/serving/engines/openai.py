"""Any OpenAI-compatible endpoint that already runs: one URL, or one for each replica."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import queue
import ssl
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.contract import Endpoint, Seat
from paceline.errors import UnsupportedError, require
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.redirects import NoRedirects

# For a whole answer, however slowly a server sends it.
REQUEST_S = 10.0
AT_ONCE = 64
# The most bytes of a server's own description.
MOST_BYTES = 1 << 20
# Where most servers listen by default.
HERE = "http://127.0.0.1:8000"
USER_ONLY = {
    "url": "where requests are sent",
    "urls": "where requests are sent",
    "key_env": "which variable is sent there as the key",
    "certificates": "which servers are trusted",
}


@dataclass(frozen=True)
class Options:
    """url: `http://host:port`, with or without /v1 (default: port 8000 here); urls: a list, one for each replica.

    model: the model name to request (default: the first one the endpoint lists). key_env: the environment variable with
    the API key. certificates: a file of certificate authorities to trust instead of the system's.
    """

    url: str = ""
    urls: tuple[str, ...] | None = None
    model: str = ""
    key_env: str = "OPENAI_API_KEY"
    certificates: str = ""

    def __post_init__(self) -> None:
        require(self.urls is None or isinstance(self.urls, list | tuple), "openai.urls", self.urls, "a list of URLs")
        require(self.urls is None or len(self.urls) > 0, "openai.urls", [], "at least one URL, or no urls")
        require(not (self.url and self.urls), "openai.url", [self.url, self.urls], "one url, or urls")
        for each in self.all_urls:
            parts = urlsplit(each)
            plain = parts.username is None and not parts.query and not parts.fragment
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and plain
            require(is_address, "openai.url", each, "http://HOST:PORT or https://HOST")
        # One server listed twice would count as two replicas, each half as fast.
        twice = [each for each, count in Counter(self.all_urls).items() if count > 1]
        require(not twice, "openai.urls", ", ".join(twice), "each URL once: a replica each")

    @property
    def all_urls(self) -> tuple[str, ...]:
        given = tuple(self.urls) if self.urls else (self.url or HERE,)
        return tuple(str(each).rstrip("/").removesuffix("/v1") for each in given)


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.engine)
    if spec.topology.world_size != 1:
        return "the engine openai runs in one process (nodes: 1, processes: 1); for several replicas give several urls"
    return None


def preflight(spec: RunSpec) -> None:
    """Report endpoints that are unreachable, or serve another model, once and not in every run."""
    _endpoints(parse_options(Options, spec.engine))


@contextlib.contextmanager
def open(spec: RunSpec, seat: Seat) -> Iterator[Sequence[Endpoint]]:
    yield _endpoints(parse_options(Options, spec.engine))


def _endpoints(chosen: Options) -> list[Endpoint]:
    """All endpoints, asked at the same time: many that do not answer take no longer than one."""
    with concurrent.futures.ThreadPoolExecutor(min(AT_ONCE, len(chosen.all_urls))) as pool:
        return list(pool.map(lambda url: _endpoint(url, chosen), chosen.all_urls))


def _endpoint(url: str, chosen: Options) -> Endpoint:
    """The endpoint, checked before the clock runs; UnsupportedError if it is unreachable or has another model."""
    secret = os.environ.get(chosen.key_env) or None
    if secret is not None and not (secret.isascii() and secret.isprintable()):
        # Refused without quoting it; building the header would quote it.
        why = "has a character that HTTP headers do not allow, such as a line end"
        raise UnsupportedError(f"the key in {chosen.key_env} {why}. Set it again")
    listed = _models(url, secret, chosen.certificates or None)
    model = chosen.model or (listed[0] if listed else "")
    if not model:
        raise UnsupportedError(f"{url} lists no model. Set openai.model")
    if listed and model not in listed:
        raise UnsupportedError(f"{url} has no model {model!r}; it has {', '.join(listed[:5])}")
    # The host name, with the port if another replica has the same host.
    name = str(urlsplit(url).hostname)
    alike = [each for each in chosen.all_urls if urlsplit(each).hostname == name]
    host = name if len(alike) == 1 else urlsplit(url).netloc
    facts = {"host": host, "version": _version(url, secret, chosen.certificates or None)}
    return Endpoint(url=url, model=model, secret=secret, certificates=chosen.certificates or None, facts=facts)


def _version(url: str, secret: str | None, certificates: str | None) -> str | None:
    """As vLLM and others report it at /version; most servers do not."""
    try:
        reply = _get(f"{url}/version", secret, certificates)
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return None
    version = reply.get("version") if isinstance(reply, dict) else None
    return version[:80] if isinstance(version, str) else None


def _get(url: str, secret: str | None, certificates: str | None) -> Any:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    request = urllib.request.Request(url, headers=headers)
    context = ssl.create_default_context(cafile=certificates) if url.startswith("https") else None
    opener = urllib.request.build_opener(NoRedirects, urllib.request.HTTPSHandler(context=context))
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            # This limit is for each byte: a server could send one every few seconds.
            with opener.open(request, timeout=REQUEST_S) as answer:
                answers.put(answer.read(MOST_BYTES))
        except (OSError, http.client.HTTPException, ValueError) as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=REQUEST_S)
    except queue.Empty:
        raise TimeoutError(f"no complete answer within {REQUEST_S:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return json.loads(answer)


def _models(url: str, secret: str | None, certificates: str | None) -> list[str]:
    try:
        reply = _get(f"{url}/v1/models", secret, certificates)
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            return []
        raise UnsupportedError(f"{url}/v1/models answers {error.code}; try: curl -i {url}/v1/models") from None
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        # Without the error text of other errors: it may quote what was sent, and the key with it.
        why = "does not answer with JSON"
        if isinstance(error, OSError):
            reason = getattr(error, "reason", error)
            why = f"does not answer ({getattr(reason, 'strerror', None) or reason})"
        elif isinstance(error, http.client.HTTPException):
            why = f"does not speak HTTP ({type(error).__name__})"
        raise UnsupportedError(f"{url} {why}; try: curl -i {url}/v1/models") from None
    entries = reply.get("data") if isinstance(reply, dict) else None
    models = entries if isinstance(entries, list) else []
    return [str(entry["id"]) for entry in models if isinstance(entry, dict) and "id" in entry]
