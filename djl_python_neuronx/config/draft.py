"""What a draft model is served with: the slots and lengths of the model that it drafts for."""

from __future__ import annotations

from djl_python_neuronx.config.defaults import make_buckets
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import ConfigError

ORIGIN = "as the model that it drafts for"


def draft_settings(options: ServingOptions, loader: str, model: str) -> dict[str, str]:
    """The options of a draft model, as text, from those of the large one, which `assess` has filled in.

    Options of the large model that do not concern it (sampling on the device, layouts, quantisation) are not among
    them. What an architecture is known to get wrong is accepted: a wrong draft costs time and changes no text.

    Raises:
        ConfigError: the options are not filled in.
    """
    limit, degree = options.max_model_len, options.tensor_parallel_degree
    if limit is None:
        msg = "n_positions must be filled in before the draft model's options are known"
        raise ConfigError(msg)
    slots = options.max_rolling_batch_size
    lengths, prompts = options.token_buckets or make_buckets(limit), options.context_length_estimate
    wanted = {
        "model_id": model,
        "model_loader": loader,
        "tensor_parallel_degree": options.draft_model_tp_size or degree,
        "n_positions": _listed(lengths),
        "max_rolling_batch_size": slots,
        "context_length_estimate": _listed(prompts or (limit,)),
        "dtype": options.dtype,
        "cpu_threads": options.cpu_threads,
        "on_mismatch": options.on_mismatch,
        "trust_remote_code": options.trust_remote_code,
        "allow_known_defects": True,
        "compiled_graph_path": options.draft_model_compiled_path or options.compiled_graph_path,
        # A single slot too is driven as the large model is, whose slots have positions of their own.
        "rolling_batch_strategy": (
            "continuous_batching" if loader != "cpu" and slots == 1 else None
        ),
    }
    return {name: str(value) for name, value in wanted.items() if value is not None}


def alone(options: ServingOptions) -> ServingOptions:
    """Options that a folder brings along, without what a draft model has no use for."""
    fields = ServingOptions.model_fields
    names = (
        *("speculative_draft_model", "ngram_prompt_lookup_max", "enable_chunked_prefill"),
        "on_device_generation",
    )
    return options.model_copy(update={name: fields[name].default for name in names})


def _listed(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths))
