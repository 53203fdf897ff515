"""Requests with a key are sent to the given address only: redirects are refused."""

from __future__ import annotations

import urllib.request


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """For `build_opener`: a redirect is an error with its 3xx status, since another host would get the key."""

    def redirect_request(self, *_: object) -> None:
        return None
