"""A model of NxD Inference: its class, and its construction from plain arguments."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.backends.neuron import check_keywords, import_library
from djl_python_neuronx.backends.nxdi.contrib.application import contributed
from djl_python_neuronx.backends.nxdi.fused import fuse
from djl_python_neuronx.backends.nxdi.masks import mask_prefixes
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.rotary import rotary_fields
from djl_python_neuronx.errors import (
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
    did_you_mean,
)
from djl_python_neuronx.planning.fields import rope_type
from djl_python_neuronx.planning.nxdi.contrib import Code
from djl_python_neuronx.planning.nxdi.versions import first_release

PACKAGE = "neuronx-distributed-inference"
_LIBRARY = "neuronx_distributed_inference"
CONFIG, NEURON_CONFIG, GRAPHS, RANKS = "config.json", "neuron_config.json", "model.pt", "weights"
"""Files of a folder that the library has compiled, and the folder of the weights that it has divided."""
QUANTISED = "quantised"
"""The folder of whole weights in 8 bits, beside the graphs."""

_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "NeuronLlamaForCausalLM",
        "mistral": "NeuronMistralForCausalLM",
        "mixtral": "NeuronMixtralForCausalLM",
        "qwen2": "NeuronQwen2ForCausalLM",
        "qwen3": "NeuronQwen3ForCausalLM",
    }
)
"""`model_type` to its class in `models/<model_type>/modeling_<model_type>.py`: the library's registry imports every
model, and torchvision for those with images."""
_NESTED = MappingProxyType(
    {
        "hybrid_sharding_config": "HybridShardingConfig",
        "lora_config": "LoraServingConfig",
        "on_device_sampling_config": "OnDeviceSamplingConfig",
    }
)
"""Keywords whose value the library makes an object of, which drops what it does not know."""
_TAKEN = re.compile(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)[\"']")


def construct(plan: LoadPlan, compiled: Path | None = None, **keywords: object) -> Any:  # noqa: ANN401
    """Return the library's application for a plan. Nothing is compiled, loaded or written.

    `compiled`: the folder of its graphs, if there is one. `keywords`: of `NeuronConfig`, above those of the plan.

    Raises:
        BackendUnavailableError: the library is missing or cannot be imported.
        BackendError: it has no class for the model.
        ValueError: rotary positions that differ from layer to layer.
        IncompatibleOptionsError: the installed library has no such keyword.
    """
    import_library(PACKAGE, _LIBRARY)
    keywords = {**plan.arguments.neuron_config, **keywords}
    if keywords.get("quantized"):
        keywords["quantized_checkpoints_path"] = str((compiled or plan.model_dir) / QUANTISED)
    if plan.code is not None:
        return _contributed(plan, plan.code, compiled, keywords)
    made, config = _configure(plan, compiled, keywords)
    if plan.fused_draft is not None:
        made = fuse(made, config, plan, plan.fused_draft, keywords, _configure)
    application = _made(made, config, plan)
    if plan.num_speculative_tokens:
        # The library makes a graph that verifies drafts in its place, which has the layout of the weights.
        application.enable_token_generation(enable_wlt_optimization=False)
    return application


def _configure(
    plan: LoadPlan,
    compiled: Path | None,
    keywords: Mapping[str, Any],
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """Return the library's class for a plan's model, and its configuration.

    `changes`: what its `NeuronConfig`, made of `keywords`, gets afterwards.
    """
    configuration = _read_config(plan, compiled)
    _translate(configuration, plan)
    made = find_class(configuration.model_type)
    neuron_config = _neuron_config(made, keywords)
    vars(neuron_config).update(changes)
    if neuron_config.is_prefix_caching:
        mask_prefixes()
    adapter = importlib.import_module(f"{_LIBRARY}.utils.hf_adapter")
    load = adapter.load_pretrained_config(hf_config=configuration)
    return made, made.get_config_cls()(neuron_config, load_config=load)


def _contributed(
    plan: LoadPlan, code: Code, compiled: Path | None, keywords: Mapping[str, Any]
) -> Any:  # noqa: ANN401
    """Return the application of a model whose code is not the library's."""
    if not plan.trust_remote_code:
        message = f"the code in {code.folder} is run with option.trust_remote_code=true alone"
        raise BackendError(message)
    folder = _config_folder(plan, compiled) or plan.model_dir

    def read(is_plain: bool) -> Any:  # noqa: ANN401
        """Return the configuration with the names of rotary positions that code for transformers 4 reads."""
        plain = importlib.import_module("transformers").PretrainedConfig
        configuration = plain.from_pretrained(folder) if is_plain else _read_config(plan, compiled)
        vars(configuration).update(rotary_fields(configuration))
        return configuration

    with contributed(code) as own:
        neuron_config = _neuron_config(own.kind, keywords)
        config = own.configure(neuron_config, folder, read)
        application = _made(own.made, config, plan)
        own.check_weights(application)
        return application


def _made(made: Any, config: Any, plan: LoadPlan) -> Any:  # noqa: ANN401
    # The library prefers this place to the one that it is given, and writes it beside the graphs. Up to 0.6 any value
    # is taken for a place or for a name of the hub.
    vars(config).pop("_name_or_path", None)
    return made(str(plan.model_dir), config)


def _translate(configuration: Any, plan: LoadPlan) -> None:  # noqa: ANN401
    """Give a configuration of any version of transformers the names and values that the library reads."""
    fields = rotary_fields(configuration)
    scaling = fields.get("rope_scaling") or {}
    if rope_type(scaling) == "linear":
        # The library's own positions for llama3 stay in float32; those of transformers, which it takes for linear, are
        # cast to the dtype of the weights. From a wavelength of 1 on, and none is shorter, both are the same.
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1,
        }
    if getattr(configuration, "head_dim", 0) is None:
        # As of a mixtral; before 0.7 the library computes only one that is absent.
        fields["head_dim"] = configuration.hidden_size // configuration.num_attention_heads
    if getattr(configuration, "hidden_act", None) == "swish":
        fields["hidden_act"] = "silu"
    window = getattr(configuration, "sliding_window", None)
    if configuration.model_type == "mistral" and window and plan.max_model_len <= window:
        # No sequence outgrows it, and with it the library needs prompt graphs and a cache as long as the window.
        fields["sliding_window"] = None
    vars(configuration).update(fields)


def unmanaged(application: Any) -> None:  # noqa: ANN401
    """Leave the places of LoRA adapters to `adapters.Places`.

    The library keeps the compiler from changing their layout where it manages them: so only after the compiler has run.
    """
    if (config := application.neuron_config.lora_config) is not None:
        config.dynamic_multi_lora = False


def rolls(configuration: Any) -> bool:  # noqa: ANN401
    """Return whether the cache is a ring as long as the model's sliding window; of gpt_oss, in every other layer."""
    window = getattr(configuration, "sliding_window", None)
    return configuration.model_type in {"gpt_oss", "mistral"} and bool(window)


def find_class(model_type: str) -> Any:  # noqa: ANN401
    """Return the installed library's class for an architecture.

    Raises:
        BackendError: it has none.
        BackendUnavailableError: its registry cannot be imported.
    """
    if name := _CLASSES.get(model_type):
        try:
            module = importlib.import_module(
                f"{_LIBRARY}.models.{model_type}.modeling_{model_type}"
            )
            return getattr(module, name)
        except (ImportError, AttributeError):
            pass  # another version has it elsewhere: its registry decides
    try:
        registry = importlib.import_module(f"{_LIBRARY}.utils.constants").MODEL_TYPES
    except ImportError as error:
        message = f"the registry of {PACKAGE} cannot be imported: {error}"
        raise BackendUnavailableError(message) from error
    found = registry.get(model_type, {}).get("causal-lm")
    if found is None:
        first = first_release(model_type)
        since = f"; {first} is the first with it" if model_type in first.models else ""
        message = (
            f"the installed {PACKAGE} has no class for model_type {model_type!r}{since}; it has "
            f"{', '.join(sorted(registry))}{did_you_mean(model_type, registry)}"
        )
        raise BackendError(message)
    return found


def _config_folder(plan: LoadPlan, compiled: Path | None) -> Path | None:
    """Return the folder with config.json: the model's, or that of its graphs; None without one."""
    folders = (folder for folder in (plan.model_dir, compiled) if folder is not None)
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def _read_config(plan: LoadPlan, compiled: Path | None) -> Any:  # noqa: ANN401  (of transformers)
    """Return the model's configuration; weights that are divided have none beside them, their graphs do."""
    auto = importlib.import_module("transformers").AutoConfig
    if (folder := _config_folder(plan, compiled)) is not None:
        return auto.from_pretrained(
            str(folder), trust_remote_code=plan.trust_remote_code, revision=plan.revision
        )
    if compiled is None or not (compiled / NEURON_CONFIG).is_file():
        message = f"there is no {CONFIG} in {plan.model_dir}; expected the model's. Copy it there"
        raise ArtifactNotFoundError(message)
    fields = json.loads((compiled / NEURON_CONFIG).read_text())
    return auto.for_model(**{key: value for key, value in fields.items() if key != "neuron_config"})


def _neuron_config(made: Any, keywords: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return a `NeuronConfig` of the class that the model takes.

    Raises:
        IncompatibleOptionsError: there is no such keyword, which the library would only log.
    """
    kind = made.get_neuron_config_cls()
    _check_keywords(kind, keywords)
    module = importlib.import_module(f"{_LIBRARY}.models.config")
    for name, nested in _NESTED.items():
        if isinstance(value := keywords.get(name), Mapping):
            _check_keywords(getattr(module, nested), value, f"{name}.")
    # New objects: the library sorts and completes some of them.
    return kind(**json.loads(json.dumps(keywords)))


def _check_keywords(kind: type, keywords: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse keywords that no class of `kind` and its bases takes out of its keywords, as its source shows."""
    bases = [base for base in kind.__mro__ if base is not object]
    known = {name for base in bases for name in inspect.signature(base).parameters} - {"kwargs"}
    known.update(*(_TAKEN.findall(inspect.getsource(base)) for base in bases))
    check_keywords(keywords, known, f"{kind.__name__} of the installed {PACKAGE}", prefix)
