"""Options of LoRA adapters. Names and defaults: LMI's, which are vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints

from djl_python_neuronx.config.values import (
    Count,
    ModelSource,
    Names,
    Option,
    OptionGroup,
    Words,
    parse_object,
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}$"
"""Names of adapters: they stand in URLs, headers and names of folders."""


def _listed(value: object) -> object:
    """Parse ``a=place,b=place``, or an object.

    Raises:
        ValueError: a name comes twice, or it is vLLM's object with `name` and `path`.
    """
    if not isinstance(value, str):
        return value
    if value.strip().startswith("{"):
        found = parse_object(value)
        if isinstance(found, dict) and {"name", "path"} <= found.keys():
            message = "an object has names as its keys; write name=place in place of vLLM's object"
            raise ValueError(message)
        return found
    pairs = [part.strip().partition("=")[::2] for part in value.split(",")]
    if len(dict(pairs)) < len(pairs):
        message = "each name must come once"
        raise ValueError(message)
    return dict(pairs)


Adapters = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=NAME)],
        Annotated[ModelSource, Field(min_length=1)],
    ],
    Field(min_length=1),
    BeforeValidator(_listed),
]


_TO = {"nxdi": "LoraServingConfig()"}


class LoraOptions(OptionGroup):
    """LoRA adapters."""

    enable_lora: Annotated[bool, Option(to=_TO, cpu=True, draft="off")] = False
    """Serve LoRA adapters beside the model: those of `adapters`, and those in the folder `adapters/` of the model
    folder, each in a folder of its name (docs/lora.md)."""
    adapters: Annotated[
        Adapters | None,
        Option(
            'names with places such as "sql=/adapters/sql,law=owner/law@v1"; names: up to 128 letters, digits, ._:@+-',
            to=_TO,
            graph=(),
            cpu=True,
            output="file",
        ),
    ] = None
    """Adapters to serve: a name and a place for each, which is a folder (absolute, or relative to the model folder), a
    Hugging Face id, with `@` and a revision if you like, or an S3 URI. As JSON, `{"name": "place"}`. vLLM's
    `--lora-modules` means the same, without its JSON."""
    max_loras: Annotated[Count, Option(to=_TO, cpu=True)] = 4
    """Most adapters that are loaded at once. Their memory is taken whether they are loaded or not."""
    max_lora_rank: Annotated[Count, Option(to=_TO, cpu=True)] = 16
    """Largest rank of an adapter."""
    adapter_sources: Annotated[
        Names | None,
        Option(
            'places such as "/adapters,s3://bucket/adapters,owner"', operator=True, output="local"
        ),
    ] = None
    """Places from which adapters may be registered, replaced and unregistered while requests run (docs/lora.md):
    absolute folders, S3 URIs, and owners or ids of Hugging Face; what is below one counts. Default: none, adapters do
    not change. The embedded server has the routes on `admin_port` alone. Also under DJL Serving."""
    lora_target_modules: Annotated[
        Words | None,
        Option(
            'names such as "q_proj,v_proj"',
            aliases=("target_modules",),
            to=_TO,
            cpu=True,
        ),
    ] = None
    """Layers that adapters may change, such as `q_proj,v_proj`. Default: those of the adapters that are found at the
    start; without any, all of attention and the feed-forward network. An adapter with others is refused. Graphs depend
    on it: set it if adapters come later."""
    lora_shard_linear_layer: Annotated[
        bool | None,
        Option(to=_TO, tunes=True),
    ] = None
    """Divide both matrices of each adapter among the cores: less memory, and one more exchange of data in a prefill.
    Default: where `tensor_parallel_degree` divides the hidden size."""
