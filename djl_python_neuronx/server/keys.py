"""API keys of the embedded server: where they come from, and the ASGI middleware that checks them.

Only digests are kept, so that no log, error or dump can show a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from djl_python_neuronx.config.sources import API_KEYS
from djl_python_neuronx.errors import ConfigError, UnauthorizedError
from djl_python_neuronx.server.http import PROBES
from djl_python_neuronx.server.responses import error_response

MISSING = (
    "no valid API key; send one as the header `Authorization: Bearer <key>` or `x-api-key: <key>`"
)
_OPENAI, _ANTHROPIC = b"authorization", b"x-api-key"
"""Headers for keys: with the scheme Bearer, and the key alone."""
_KEY = re.compile(rb"[\x21-\x7e]+")


def read_keys(file: str | None, variable: str | None) -> list[bytes]:
    """The digests of the keys in `option.api_key_file` and of those in the variable `API_KEYS`; none without both.

    Raises:
        ConfigError: the file cannot be read, one of both has no key, or a key cannot stand in a header.
    """
    found: list[bytes] = []
    for origin, parts in (
        (f"option.api_key_file={file}", None if file is None else _lines(file)),
        (API_KEYS, None if variable is None else os.fsencode(variable).split(b",")),
    ):
        if parts is None:
            continue
        keys = {i: part.strip() for i, part in enumerate(parts, 1)}
        wrong = [i for i, key in keys.items() if key and not _KEY.fullmatch(key)]
        if wrong or not any(keys.values()):
            problem = f"part {wrong[0]} is not an API key" if wrong else "it has no API key"
            msg = f"{origin}: {problem}; expected keys of visible ASCII characters without spaces, or no such setting"
            raise ConfigError(msg)
        found += [_digest(key) for key in keys.values() if key]
    return found


def _lines(file: str) -> list[bytes]:
    path = Path(os.path.expanduser(file))  # noqa: PTH111  (pathlib raises for the home of an unknown user)
    try:
        lines = path.read_bytes().splitlines()
    except (OSError, ValueError) as error:
        msg = f"option.api_key_file: {error}; expected a file with one API key in each line"
        raise ConfigError(msg) from error
    return [b"" if line.lstrip().startswith(b"#") else line for line in lines]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyCheck:
    """Answers requests without a key by 401, before their body is read. `PROBES` need none.

    The application gets the key's digest in place of the header, the same one however the header is written.
    """

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        digest = self._admitted(scope["headers"])
        if digest is not None:
            others = [one for one in scope["headers"] if one[0] not in (_OPENAI, _ANTHROPIC)]
            headers = [*others, (_OPENAI, b"Bearer " + digest.hex().encode())]
            scope = {**scope, "headers": headers}
        if scope["path"] in PROBES or digest is not None:
            await self._app(scope, receive, send)
            return
        response = error_response(UnauthorizedError(MISSING), path=scope["path"])
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _admitted(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """The digest of the key that the headers have; None without. Time does not depend on nearly right keys."""
        found = None
        for name, value in headers:
            scheme, _, key = value.partition(b" ")
            if name == _ANTHROPIC:
                key = value
            elif name != _OPENAI or scheme.lower() != b"bearer":
                continue
            sent = _digest(key.strip())
            for digest in self._digests:
                if hmac.compare_digest(sent, digest):
                    found = digest
        return found
