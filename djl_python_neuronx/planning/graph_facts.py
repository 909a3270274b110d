"""What a compiled graph depends on: what names it in a store, and what must not differ when it is used."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.errors import InvalidOptionError
from djl_python_neuronx.planning.intent import speculating
from djl_python_neuronx.planning.loader import NEURON_LOADERS, libraries

_FLAGS = "NEURON_CC_FLAGS"
_PLACE = "--cache_dir"

_NOT_IN_GRAPHS = frozenset(
    {
        *("compiled_graph_path", "draft_model_compiled_path", "compilation_worker_count"),
        *("save_sharded_checkpoint", "quantized_checkpoints_path"),
        # A path or name; the draft model itself counts, by its digest.
        "speculative_draft_model",
    }
)
"""Options that the libraries take and no graph depends on."""
_OF_DRAFTS = frozenset({"speculative_length", "draft_model_tp_size", "ngram_prompt_lookup_max"})
_OURS = frozenset({"rolling_batch_strategy"})
"""Options that no library takes by name and that decide what it is given."""


def graph_options(options: ServingOptions, loader: str) -> dict[str, Any]:
    """The options that the graphs of a loader depend on, as JSON has them; those that are not set are left out.

    All that the loader's library is given counts, so that a new option needs no entry here.
    """
    names = {
        name
        for name, entry in ServingOptions.model_fields.items()
        if (loader in option(name).to or name in _OURS)
        and name not in _NOT_IN_GRAPHS
        and not (getattr(options, name) is False and entry.default is False)
    }
    if not speculating(options):
        names -= _OF_DRAFTS
    elif loader == "tnx":
        # The draft model is compiled by itself, and how many drafts are verified is all that the large one knows.
        names -= _OF_DRAFTS - {"speculative_length"}
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
