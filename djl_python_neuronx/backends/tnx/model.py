"""A model of transformers-neuronx: its class, and its construction from plain arguments."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.backends import neuron
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.rotary import rotary_fields
from djl_python_neuronx.errors import ArtifactError
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.fields import rope_type

PACKAGE = "transformers-neuronx"

CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "bloom": "BloomForSampling",
        "gpt2": "GPT2ForSamplingWithContextBroadcasting",
        "gpt_bigcode": "GPT2ForSamplingWithContextBroadcasting",
        "gpt_neox": "GPTNeoXForSampling",
        "gptj": "GPTNeoXForSampling",
        "llama": "LlamaForSampling",
        "mistral": "MistralForSampling",
        "mixtral": "MixtralForSampling",
        "opt": "OPTForSampling",
    }
)
"""`model_type` to the class that serves it."""

_ADAPTED: Mapping[str, str] = MappingProxyType({"gpt_bigcode": "GptBigCode", "gptj": "GptJ"})
"""`model_type` to the class in adapted.py that gives the one above the weights as it expects them."""

CACHE_CALL = "init_cache_engine"
"""The call of `LibraryArguments.calls` that is not a method of the model."""


def import_library() -> Any:  # noqa: ANN401  (a module without types)
    """Import the library.

    Raises:
        BackendUnavailableError: it is missing, PyPI's placeholder, or cannot be imported.
    """
    return neuron.import_library(PACKAGE, "transformers_neuronx")


def model_type_of(model_dir: Path) -> str:
    """Return the `model_type` in a folder's config.json.

    Raises:
        ArtifactError: it has none.
    """
    try:
        return str(json.loads((model_dir / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError) as error:
        message = f"{model_dir / 'config.json'} names no model_type; expected one such as 'llama'"
        raise ArtifactError(message) from error


def construct(plan: LoadPlan) -> Any:  # noqa: ANN401
    """Return the model that the library builds from the plan's arguments, before any of their calls."""
    library = import_library()
    model_type = model_type_of(plan.model_dir)
    module = library
    if model_type in _ADAPTED:
        # Not at the top: it imports the library.
        module = importlib.import_module("djl_python_neuronx.backends.tnx.adapted")
    made = getattr(module, _ADAPTED.get(model_type, CLASSES[model_type]))
    return _reading_any_version(made).from_pretrained(
        str(plan.model_dir),
        neuron_config=_neuron_config(library, plan.arguments),
        **plan.arguments.constructor,
    )


class _Configuration:
    """A configuration of transformers, and above its fields those that the library reads under other names."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        self._config = config
        fields = rotary_fields(config)
        scaling = fields.get("rope_scaling") or {}
        if rope_type(scaling) == "linear":
            fields |= {"rope_scaling": None, "position_interpolation_factor": scaling["factor"]}
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._config, name)


def _reading_any_version(made: Any) -> Any:  # noqa: ANN401
    """Return a model class of the library for configurations of every version of transformers.

    By itself it reads the names of transformers 4, and takes its own defaults where version 5 has others. Of pickles,
    unlike safetensors, it completes no names: neither the base model's prefix nor weights that are tied.
    """

    def begin(self: Any, config: Any, **keywords: Any) -> None:  # noqa: ANN401
        made.__init__(self, _Configuration(config), **keywords)

    def read(self: Any, folder: str) -> None:  # noqa: ANN401
        model = getattr(self, "chkpt_model", self)
        base, load = model.get_base_model(), model.load_state_dict_low_memory

        def load_both(weights: dict[str, Any]) -> None:
            load(weights)
            if base is not None:
                base.load_state_dict_low_memory(weights)

        model.load_state_dict_low_memory = load_both
        made.load_state_dict_dir(self, folder)
        del model.load_state_dict_low_memory
        # Not at the top: check must not import torch.
        is_lazy = importlib.import_module("torch.nn.parameter").is_lazy
        for tied in model.get_tied_parameters():
            there = [weight.data for weight in tied if not is_lazy(weight)]
            for weight in tied:
                if there and is_lazy(weight):
                    weight.materialize(there[0].shape)
                    weight.data.copy_(there[0])

    return type(made.__name__, (made,), {"__init__": begin, "load_state_dict_dir": read})


def _neuron_config(library: Any, arguments: LibraryArguments) -> Any:  # noqa: ANN401
    """Return a `NeuronConfig` of new objects: tracing changes some of them.

    Raises:
        IncompatibleOptionsError: the installed library has no such keyword, which it would only assert.
    """
    parameters = inspect.signature(library.NeuronConfig).parameters.values()
    known = [entry.name for entry in parameters if entry.kind is not entry.VAR_KEYWORD]
    neuron.check_keywords(
        arguments.neuron_config, known, f"NeuronConfig of the installed {PACKAGE}"
    )
    config = importlib.import_module(f"{library.__name__}.config")
    classes: dict[str, Any] = {
        "quant": library.QuantizationConfig,
        "kv_cache_quant": config.KVCacheQuantizationConfig,
        "continuous_batching": library.ContinuousBatchingConfig,
        "on_device_generation": library.GenerationConfig,
    }
    keywords = dict(arguments.neuron_config)
    if keywords.get("group_query_attention") is not None:
        keywords["group_query_attention"] = library.GQA(keywords["group_query_attention"])
    for name, make in classes.items():
        if isinstance(keywords.get(name), Mapping):
            keywords[name] = make(**keywords[name])
    if CACHE_CALL in arguments.calls:
        keywords["continuous_batching"].init_cache_engine(**arguments.calls[CACHE_CALL])
    return library.NeuronConfig(**keywords)
