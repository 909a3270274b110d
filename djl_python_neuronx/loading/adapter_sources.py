"""Adapters that are registered while requests run: where they may come from, and their folders."""

from __future__ import annotations

from pathlib import Path

from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.loading.adapters import obtain
from djl_python_neuronx.loading.prepared import Prepared


def fetch_allowed(prepared: Prepared, name: str, source: str) -> Path:
    """The checked folder of an adapter from a place of `option.adapter_sources`, or from its own at the start.

    Raises:
        ServingError: the source is another place, or the adapter cannot be fetched or served.
    """
    options, facts = prepared.options, prepared.case.model
    places = [*(options.adapter_sources or ())]
    own = [one.place for one in prepared.adapters if one.name == name]
    if not source.isprintable() or not any(is_below(source, one) for one in (*own, *places)):
        msg = (
            f"the adapter {name[:200]!r} may not come from {source[:200]!r}; expected a place of "
            f"option.adapter_sources, or one below it: {', '.join(places) or 'none is set'}"
        )
        raise RequestError(msg)
    base, environ = options.model_dir, prepared.environ
    found = obtain(name, source, options, facts, environ, origin="the request", base=base)
    return found.folder or Path(source)


def is_below(source: str, place: str) -> bool:
    """True if a source is a place of `option.adapter_sources`, or lies below it."""
    if place.startswith("/"):
        found = Path(source).resolve()
        return source.startswith("/") and found.is_relative_to(Path(place).resolve())
    name = source if "://" in source else source.partition("@")[0]  # a hub's name has a revision
    return ".." not in name.split("/") and f"{name}/".startswith(f"{place.rstrip('/')}/")
