"""The application of a model that lies outside NxD Inference: class, configuration, and a check of its weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from djl_python_neuronx.artifacts.folder import read_json
from djl_python_neuronx.backends.nxdi.contrib import package_of, register
from djl_python_neuronx.backends.rotary import rotary_fields
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import ArtifactError, BackendError
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.contrib import Code

_LIBRARY = "neuronx_distributed_inference"
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_attention_heads": "num_heads",
}
"""Attribute of a configuration to that of `ModelFacts`."""
_CACHE = "kv_mgr."
"""Parameters of the module that are state, not weights."""


@dataclass(frozen=True)
class Contributed:
    """The classes that a folder's code defines."""

    code: Code
    made: Any
    """The class of the application."""
    kind: Any
    """That of its configuration."""

    def configure(self, neuron_config: object, folder: Path, read: Callable[[bool], Any]) -> Any:  # noqa: ANN401
        """Return the configuration of the model in `folder`, in the way that is known to be right for this code.

        `read` returns that of transformers, of no architecture if its argument is true.

        Raises:
            BackendError: it does not have the numbers of config.json, or ties embeddings that the code cannot tie.
        """
        row = self.code.row
        if row.made == "from_pretrained":
            config = self.kind.from_pretrained(str(folder), neuron_config=neuron_config)
        else:
            adapter = importlib.import_module(f"{_LIBRARY}.utils.hf_adapter")
            configuration = read(row.made == "plain_config")
            load = adapter.load_pretrained_config(hf_config=configuration)
            config = self.kind(neuron_config, load_config=load)
        for name, value in {**row.values, **dict.fromkeys(row.unset)}.items():
            setattr(config, name, value)
        self._check_numbers(config, folder)
        base = importlib.import_module(f"{_LIBRARY}.models.application_base").NeuronApplicationBase
        ties = self.made.update_state_dict_for_tied_weights
        is_base = ties is base.update_state_dict_for_tied_weights
        if getattr(config, "tie_word_embeddings", False) and is_base:
            msg = (
                f"the model ties its embeddings, and {self.made.__name__} in {self.code.folder} has no "
                "update_state_dict_for_tied_weights. Take other code"
            )
            raise BackendError(msg)
        return config

    def _check_numbers(self, config: Any, folder: Path) -> None:  # noqa: ANN401
        raw = read_json(folder / "config.json")
        facts = ModelFacts.from_config(raw)
        numbers = {name: getattr(facts, of_facts) for name, of_facts in _SIZES.items()}
        positions = {**raw, **rotary_fields(SimpleNamespace(**raw))}
        for name, wanted in {**numbers, "rope_theta": positions.get("rope_theta")}.items():
            value = getattr(config, name, None)
            if None not in {value, wanted} and value != wanted:
                msg = (
                    f"{type(config).__name__} in {self.code.folder} has {name}={value}, and config.json of "
                    f"{folder} {wanted}: the code does not read this configuration. Take other code"
                )
                raise BackendError(msg)

    def check_weights(self, application: Any) -> None:  # noqa: ANN401
        """Let a load and a compile fail at weights that the checkpoint lacks: the library would leave them random."""
        build = application.get_builder

        def get_builder(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            builder = build(*arguments, **keywords)
            if "shard_weights_with_cache" not in vars(builder):
                builder.shard_weights_with_cache = self._checking(builder.shard_weights_with_cache)
            return builder

        application.get_builder = get_builder

    def _checking(self, shard: Callable[..., Any]) -> Callable[..., Any]:
        def checked(rank: int, model: Any, checkpoint: Any, *more: Any) -> Any:  # noqa: ANN401
            # Ranks are whole numbers, which the library does not find for its own classes either.
            needed = {
                name
                for name, tensor in model.state_dict().items()
                if tensor.is_floating_point() and not name.startswith(_CACHE)
            }
            if missing := sorted(needed - checkpoint.keys()):
                msg = (
                    f"{self.made.__name__} in {self.code.folder} finds no weights for {join_words(missing[:5])} "
                    f"({len(missing)} in all) in the checkpoint: the code is for other checkpoints, or loses their "
                    "names. Take other code"
                )
                raise BackendError(msg)
            return shard(rank, model, checkpoint, *more)

        return checked


@contextmanager
def contributed(code: Code) -> Iterator[Contributed]:
    """The classes of a folder's code. Inside, its module is found by its bare name too, which some import.

    Raises:
        ArtifactError: the code is another than that of the plan, or cannot be imported.
        BackendError: it has no class for a causal language model, or several.
    """
    read = register(code.folder, code.digest)
    base = importlib.import_module(f"{_LIBRARY}.models.model_base").NeuronBaseForCausalLM
    wanted = code.class_name or code.row.class_name
    found, bare = {}, {}
    for name in read.modules:
        try:
            module = importlib.import_module(f"{package_of(code.digest)}.{name}")
        except Exception as error:
            msg = f"{name}.py in {code.folder} cannot be imported: {type(error).__name__}: {error}. Take other code"
            raise ArtifactError(msg) from error
        bare[name] = module
        own = _classes(module, base)
        found.update({each: own[each] for each in own if wanted in {"", each}})
    if len(found) != 1:
        held = join_words(found, "or") or f"no {wanted or 'subclass of NeuronBaseForCausalLM'}"
        msg = f"the code in {code.folder} has {held}; name its class with option.nxdi_model_class"
        raise BackendError(msg)
    (made,) = found.values()
    before = {name: sys.modules[name] for name in bare if name in sys.modules}
    sys.modules.update(bare)
    try:
        yield Contributed(code, made, _configuration_class(made, sys.modules[made.__module__]))
    finally:
        for name in bare:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _classes(module: ModuleType, base: type) -> dict[str, type]:
    """The classes that the module itself defines, by name: it may import others of the library."""
    return {
        each.__name__: each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, base) and each.__module__ == module.__name__
    }


def _configuration_class(made: Any, module: ModuleType) -> Any:  # noqa: ANN401
    base = importlib.import_module(f"{_LIBRARY}.models.config").InferenceConfig
    try:
        return made.get_config_cls()
    except (NotImplementedError, NameError):
        own = [*_classes(module, base).values()]
        return own[0] if len(own) == 1 else base
