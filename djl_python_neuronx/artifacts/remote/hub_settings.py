"""How the Hugging Face hub is to be reached: its variables, read in one place for the configuration and the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ON = frozenset({"1", "on", "yes", "true"})


@dataclass(frozen=True)
class HubSettings:
    """What the hub's library is told; what the environment leaves out, it knows by itself (a login's token)."""

    endpoint: str
    """Without a slash at its end; may hold a user and a password."""
    cache_dir: Path
    token: str | None = field(repr=False)
    offline: bool
    """Nobody is asked, what is in the cache is taken."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HubSettings:
        """The settings in `environ`, which win over those of the process.

        `HF_ENDPOINT`, `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME`,
        `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE`. The line end that files and Kubernetes' secrets add to a value is
        none of it. Where the process is offline, so are we: its library would refuse to ask.

        Raises:
            RuntimeError: a folder starts with `~` where there is no such home.
        """
        from huggingface_hub import constants

        told = {name: value.strip() for name, value in environ.items() if value.strip()}
        cache = told.get("HF_HUB_CACHE") or told.get("HUGGINGFACE_HUB_CACHE")
        if cache is None and (home := told.get("HF_HOME")):
            cache = f"{home}/hub"
        return cls(
            endpoint=told.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/"),
            cache_dir=Path(cache or constants.HF_HUB_CACHE).expanduser(),
            token=told.get("HF_TOKEN") or told.get("HUGGING_FACE_HUB_TOKEN"),
            offline=constants.HF_HUB_OFFLINE
            or any(
                told.get(name, "").lower() in _ON
                for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
            ),
        )

    @property
    def site(self) -> str:
        """The endpoint for messages: without the user and the password that it may hold."""
        start, separator, rest = self.endpoint.rpartition("@")
        return f"{start.partition('://')[0]}://{rest}" if separator and "://" in start else rest
