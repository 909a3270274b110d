"""What a compiled graph depends on: what names it in a store, and what must not differ when it is used."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from djl_python_neuronx.config.options import ServingOptions, SpeculationOptions, option
from djl_python_neuronx.errors import InvalidOptionError
from djl_python_neuronx.planning.loader import NEURON_LOADERS, libraries

_FLAGS = "NEURON_CC_FLAGS"
_PLACE = "--cache_dir"


def graph_options(options: ServingOptions, loader: str) -> dict[str, Any]:
    """Options that the graphs of a backend depend on, as JSON values; without those that are not set.

    Everything that the backend's library gets counts, unless `Option.graph` says otherwise.
    """
    names = {
        name
        for name, entry in ServingOptions.model_fields.items()
        if option(name).shapes_graphs(loader)
        and not (getattr(options, name) is False and entry.default is False)
    }
    if not options.speculating:
        names -= set(SpeculationOptions.model_fields)
    return {
        name: value
        for name, value in options.model_dump(mode="json", include=names).items()
        if value is not None
    }


def library_facts(loader: str) -> dict[str, Any]:
    """The version of the library that traces the graphs, which changes them as the compiler's does; empty: unknown."""
    package = NEURON_LOADERS.get(loader)
    version = None if package is None else libraries()[package].version
    return {} if version is None else {"library_version": version}


def flag_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """The compiler's flags that the environment adds to those of the options, in their order; empty: none.

    Where the compiler keeps its cache (`--cache_dir`) changes no graph.

    Raises:
        InvalidOptionError: a quote is not closed.
    """
    text = environ.get(_FLAGS, "")
    try:
        words = iter(shlex.split(text))
    except ValueError as error:
        expected = "flags as a shell has them, each quote closed"
        raise InvalidOptionError(_FLAGS, text, "environment", expected) from error
    flags = []
    for word in words:
        if word == _PLACE:
            next(words, None)  # its value
        elif not word.startswith(f"{_PLACE}="):
            flags.append(word)
    return {"cc_flags": flags} if flags else {}
