"""The page at `/` for browsers: one file, whose policy lets a browser run, load and send to nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_FILE = Path(__file__).with_name("page.html")


class Page:
    """Answers a browser's `GET /`, without an API key: the file holds no secret. The app gets all other requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        text = _FILE.read_text(encoding="utf-8")
        headers = {
            "content-security-policy": content_policy(text),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "vary": "accept",
        }
        self._response = HTMLResponse(text, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        is_page = scope["path"] == "/" and scope["method"] in {"GET", "HEAD"}
        if is_page and "text/html" in Headers(scope=scope).get("accept", "").lower():
            await self._response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def content_policy(text: str) -> str:
    """The Content-Security-Policy of a page: its own style and script by their hashes, requests to its server.

    Its icon is a `data:` URL: without one a browser would ask for `/favicon.ico`.
    """
    rules = {
        "default-src": "'none'",
        "style-src": _hash(text, "style"),
        "script-src": _hash(text, "script"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(map(" ".join, rules.items()))


def _hash(text: str, tag: str) -> str:
    """The hash of the only element of a tag, as a policy names it."""
    (content,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
