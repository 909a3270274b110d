"""How the Hugging Face hub is to be reached: its variables, read in one place for the configuration and the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from djl_python_neuronx.errors import ArtifactAccessError

_ON = frozenset({"1", "on", "yes", "true"})
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_CACHES = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"))
"""Variables that tell where the cache is, and in which folder there; the first counts."""
_USERINFO = re.compile(r"(?<=//)[^/\s]*@")


@dataclass(frozen=True)
class HubSettings:
    """What the hub's library is told; what the environment leaves out, it knows by itself (a login's token)."""

    endpoint: str = field(repr=False)
    """Without a slash at its end; may hold a user and a password."""
    cache_dir: Path
    token: str | None = field(repr=False)
    offline: str
    """The variables that say so; then nobody is asked, what is in the cache is taken. Empty: the hub is asked."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HubSettings:
        """The settings in `environ`, which win over those of the process.

        `HF_ENDPOINT`, `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME`,
        `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE`. The line end that files and Kubernetes' secrets add to a value is
        none of it. Where the process is offline, so are we: its library would refuse to ask.

        Raises:
            ArtifactAccessError: the endpoint is no URL, or the cache is in the home of a user that there is not.
        """
        from huggingface_hub import constants

        told = {name: value.strip() for name, value in environ.items() if value.strip()}
        endpoint = told.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        _check_url(endpoint)
        offline = " and ".join(name for name in _OFFLINE if told.get(name, "").lower() in _ON)
        return cls(
            endpoint=endpoint,
            cache_dir=_cache_dir(told, constants.HF_HUB_CACHE),
            token=told.get("HF_TOKEN") or told.get("HUGGING_FACE_HUB_TOKEN"),
            offline=offline or (" or ".join(_OFFLINE) if constants.HF_HUB_OFFLINE else ""),
        )

    @property
    def site(self) -> str:
        """The endpoint for messages."""
        return without_users(self.endpoint)


def without_users(text: str) -> str:
    """A text without the users and passwords that URLs in it hold."""
    return _USERINFO.sub("", text)


def _check_url(endpoint: str) -> None:
    """Refuse a password whose `/`, `?` or `#` ends the host: libraries and messages would show parts of it.

    One such as `8/x` is a port and a path by the URL's grammar, and cannot be told from one.
    """
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
        broken = "@" in parts.query + parts.fragment
    except ValueError:
        broken = True
    if broken:
        msg = (
            "HF_ENDPOINT is no URL: its host or port is malformed (its value is not shown, as it may hold a password). "
            "Correct it; in a user or a password write %2F for '/', %3F for '?' and %23 for '#'"
        )
        raise ArtifactAccessError(msg)


def _cache_dir(told: Mapping[str, str], default: str) -> Path:
    """Where the hub's library keeps models; `default` is its own choice."""
    name, below = next((one for one in _CACHES if one[0] in told), ("HF_HOME or HF_HUB_CACHE", ""))
    value = told.get(name, default)
    try:
        return Path(value, below).expanduser()
    except RuntimeError as error:
        msg = f"{name} is {value!r}, but there is no such user's home. Set it to an absolute path"
        raise ArtifactAccessError(msg) from error
