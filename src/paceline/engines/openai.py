"""Any OpenAI-compatible endpoint that already runs: one URL, or one for each replica."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import UnsupportedError
from paceline.plugins import Endpoint, Seat, options
from paceline.spec import RunSpec, require

LOOK_S = 10.0
# Of what a server says about itself.
MOST_BYTES = 1 << 20
# Where most servers listen that were started without a word about it.
HERE = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Options:
    """url: `http://host:port`, with or without /v1 (default: port 8000 here); urls: a list, one for each replica.

    model: the name that is asked for (default: the first one the endpoint lists). key_env: the variable that holds the
    key the endpoint wants. certificates: a file of authorities to trust instead of the system's.
    """

    url: str = ""
    urls: tuple[str, ...] | None = None
    model: str = ""
    key_env: str = "OPENAI_API_KEY"
    certificates: str = ""

    def __post_init__(self) -> None:
        require(self.urls is None or isinstance(self.urls, list | tuple), "openai.urls", self.urls, "a list of URLs")
        require(not (self.url and self.urls), "openai.url", [self.url, self.urls], "one url, or urls")
        for each in self.all_urls:
            require(_is_address(each), "openai.url", each, "http://HOST:PORT or https://HOST")

    @property
    def all_urls(self) -> tuple[str, ...]:
        given = tuple(self.urls) if self.urls else (self.url or HERE,)
        return tuple(str(each).rstrip("/").removesuffix("/v1") for each in given)


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    plain = parts.username is None and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain


def check(spec: RunSpec) -> str | None:
    assert spec.engine is not None
    options(Options, spec.engine)
    if spec.topology.world_size != 1:
        return "the engine openai asks endpoints from one process; several replicas are several urls"
    return None


@contextlib.contextmanager
def open(spec: RunSpec, seat: Seat) -> Iterator[Sequence[Endpoint]]:
    assert spec.engine is not None
    chosen = options(Options, spec.engine)
    yield [_found(url, chosen) for url in chosen.all_urls]


def _found(url: str, chosen: Options) -> Endpoint:
    """Asked once before the clock runs: an endpoint that is away, or has another model, is told at once."""
    secret = os.environ.get(chosen.key_env) or None
    listed = _models(url, secret, chosen.certificates or None)
    model = chosen.model or (listed[0] if listed else "")
    if not model:
        raise UnsupportedError(f"{url} lists no model: give openai.model")
    if listed and model not in listed:
        raise UnsupportedError(f"{url} has no model {model!r}; it has {', '.join(listed[:5])}")
    facts = {"host": _host(url, chosen.all_urls), "version": _version(url, secret, chosen.certificates or None)}
    return Endpoint(url=url, model=model, secret=secret, certificates=chosen.certificates or None, facts=facts)


def _host(url: str, urls: Sequence[str]) -> str:
    """Its name; with the port where another replica has the same one."""
    name = str(urlsplit(url).hostname)
    alike = [each for each in urls if urlsplit(each).hostname == name]
    return name if len(alike) == 1 else urlsplit(url).netloc


def _version(url: str, secret: str | None, certificates: str | None) -> str | None:
    """As vLLM and others tell it at /version; most servers do not."""
    try:
        told = _get(f"{url}/version", secret, certificates)
    except (OSError, ValueError):
        return None
    version = told.get("version") if isinstance(told, dict) else None
    return version[:80] if isinstance(version, str) else None


def _get(url: str, secret: str | None, certificates: str | None) -> Any:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    request = urllib.request.Request(url, headers=headers)
    context = ssl.create_default_context(cafile=certificates) if url.startswith("https") else None
    with urllib.request.urlopen(request, timeout=LOOK_S, context=context) as answer:
        return json.loads(answer.read(MOST_BYTES))


def _models(url: str, secret: str | None, certificates: str | None) -> list[str]:
    try:
        told = _get(f"{url}/v1/models", secret, certificates)
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            return []
        raise UnsupportedError(f"{url}/v1/models answers {error.code}; try: curl -i {url}/v1/models") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnsupportedError(f"{url} does not answer ({reason}); try: curl -i {url}/v1/models") from None
    entries = told.get("data", []) if isinstance(told, dict) else []
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
