"""LoRA adapters in PEFT's format: their facts, and what of them can be served. No tensor is read, nothing is run.

What is refused would otherwise be left out in silence. Source: peft 0.21, tuners/lora/config.py, layer.py and
utils/other.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.folder import Folder, Selection, reading, some
from djl_python_neuronx.artifacts.tensor_files import TensorEntry, check_pickles, read_header
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.planning.lora import layer_shapes
from djl_python_neuronx.planning.model import ModelFacts

FOLDER = "adapters"
"""The folder of adapters beside a model, each in a folder of its name: LMI's."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
FILES = Selection(
    "adapter",
    lambda names: (
        [one for one in (CONFIG, WEIGHTS) if one in names]
        + [one for one in PICKLES if one in names and WEIGHTS not in names]
    ),
)
"""The files of an adapter."""

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(layers\.[0-9]{1,5}\.[\w.]{1,99})\.lora_([AB])\.weight"
)
_MOST_PROBLEMS = 4
"""Named in a message."""
_MOST_LAYERS = 1000
"""More than any model has."""
_TYPES = ("F32", "F16", "BF16")
_PLAIN = re.compile(r"[\w.]+")
_READ = frozenset(
    [
        *("alpha_pattern", "lora_alpha", "r", "rank_pattern", "use_rslora"),
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
        *("corda_config", "eva_config", "inference_mode", "loftq_config", "lora_dropout"),
        *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    ]
)
"""Fields that are read, or that change nothing once an adapter is trained."""
_LISTS = {"exclude_modules": str, "layers_to_transform": int, "target_modules": str}
"""Fields that have values of a type, one or a list of them, or null."""
_SAME: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others (pissa, olora, loftq ...) change the weights of the model that the adapter belongs to.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""Values of other fields that change nothing, beside null, false and what is empty."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's facts."""

    name: str
    place: str
    """The folder, Hugging Face id or URI that was given."""
    folder: Path
    """The files on this machine, or the place if they were not fetched."""
    config: Mapping[str, Any] = field(repr=False)
    """Content of its adapter_config.json, empty if that was not fetched."""
    tensors: Mapping[tuple[str, str], TensorEntry] = field(repr=False)
    """Path of a layer, as in `layers.0.self_attn.q_proj`, and ``A`` or ``B``, to the matrix. Empty: not fetched, or not
    safetensors."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers that it changes."""
        return tuple(dict.fromkeys(layer for layer, _ in self.tensors))

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of these layers, as in `q_proj`."""
        targets = self.config.get("target_modules")
        named = targets if isinstance(targets, list) and not self.layers else self.layers
        return tuple(sorted({str(one).rpartition(".")[2] for one in named}))

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(map(self.layer_rank, self.layers), default=self.config.get("r", 0))

    def layer_rank(self, layer: str) -> int:
        """The rank of a layer."""
        return self.tensors[layer, "A"].shape[0]

    def scaling(self, layer: str) -> float:
        """The factor of the product B x A of a layer."""
        rank = self.layer_rank(layer)
        alpha = _of_pattern(self.config.get("alpha_pattern"), layer, self.config["lora_alpha"])
        return float(alpha / (sqrt(rank) if self.config.get("use_rslora") else rank))


def part(tensor: str) -> tuple[str, str] | None:
    """The layer and the side, ``A`` or ``B``, of a tensor's name; None if it is no matrix of a layer."""
    match = _TENSOR.fullmatch(tensor)
    return None if match is None else (match[1], match[2])


def read(folder: Path, name: str, place: str = "", root: Path | None = None) -> Adapter:
    """Read the facts of an adapter. `root`: the model folder that it is a part of, if it is.

    Raises:
        ArtifactError: files are missing, damaged or of another format, or it needs what is not served.
    """
    with reading(folder):
        files = Folder.open(folder, root and root.resolve())
    config = files.json(CONFIG)
    if not config:
        msg = f"the adapter {name!r} ({folder}) has no {CONFIG}; expected a folder that peft's save_pretrained wrote"
        raise ArtifactNotFoundError(msg)
    pickle = next((one for one in PICKLES if one in files.names), None)
    if WEIGHTS not in files.names and pickle is not None:
        check_pickles(files, [pickle])
        adapter = Adapter(name, place or str(folder), folder, config, {})
        _refuse(adapter, _unserved(config))
        return adapter
    header = read_header(files.file(WEIGHTS))
    tensors = {known: entry for one, entry in header.items() if (known := part(one))}
    # Two names of one matrix too.
    others = [one for one in header if header[one] is not tensors.get(part(one) or ("", ""))]
    adapter = Adapter(name, place or str(folder), folder, config, tensors)
    _refuse(adapter, [*_unserved(config), *_wrong_tensors(adapter, others)])
    return adapter


def check(adapter: Adapter, model: ModelFacts, max_rank: int, modules: Collection[str]) -> None:
    """Check an adapter against a model and the places for adapters. `modules`: empty: all that the model has.

    Raises:
        ArtifactError: it does not fit.
    """
    _refuse(adapter, _misfits(adapter, model, max_rank, modules))


def _refuse(adapter: Adapter, problems: Collection[str] | Iterator[str]) -> None:
    if found := [*problems]:
        more = f", and {len(found) - _MOST_PROBLEMS} more" if len(found) > _MOST_PROBLEMS else ""
        msg = (
            f"the adapter {adapter.name!r} ({adapter.place}) cannot be served: {'; '.join(found[:_MOST_PROBLEMS])}"
            f"{more}. Correct that, leave the adapter out, or merge it into the model"
        )
        raise ArtifactError(msg)


def _unserved(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a configuration that ask for more than two matrices for a layer, or make no sense."""
    given = {"peft_type": "missing", **config}
    for name in sorted(given.keys() - _READ):
        if given[name] and given[name] not in _SAME.get(name, ()):
            yield f"{shortened(name)} is {shortened(given[name])!r}, which is not served"
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(rank, int) and _is_number(rank)):
        yield f"r is {shortened(rank)!r}; expected a whole number of at least 1"
    if not _is_number(alpha):
        yield f"lora_alpha is {shortened(alpha)!r}; expected a number above 0 and below 2**63"
    for name in ("alpha_pattern", "rank_pattern"):
        yield from _wrong_pattern(name, config.get(name) or {})
    for name, kind in _LISTS.items():
        if not all(type(one) is kind for one in _listed(config.get(name))):
            yield f"{name} is {shortened(config[name])!r}; expected null, one {kind.__name__} or a list of them"


def _wrong_pattern(name: str, values: object) -> Iterator[str]:
    if not isinstance(values, Mapping) or not all(map(_is_number, values.values())):
        yield f"{name} is {shortened(values)!r}; expected numbers above 0 and below 2**63"
    elif not all(map(_PLAIN.fullmatch, values)):
        yield f"{name} has regular expressions; expected names of layers"


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and 0 < value < 2**63  # type: ignore[operator]


def _listed(value: Any) -> list[Any]:  # noqa: ANN401
    return value if isinstance(value, list) else [] if value is None else [value]


def _wrong_tensors(adapter: Adapter, unknown: Collection[str]) -> Iterator[str]:
    """Yield the tensors that are not matrices A and B of a layer, lack the other one, or have another rank."""
    if unknown:
        yield f"it has {some(sorted(unknown))}; expected base_model.model.model.layers.*.lora_A.weight and lora_B alone"
    if not adapter.tensors and not unknown:
        yield "it has no tensors"
    for layer in adapter.layers:
        pair = [adapter.tensors.get((layer, side)) for side in "AB"]
        rank = _of_pattern(adapter.config.get("rank_pattern"), layer, adapter.config.get("r"))
        shapes = [tensor.shape if tensor is not None else None for tensor in pair]
        if None in pair or [len(shape or ()) for shape in shapes] != [2, 2]:
            yield f"{layer} has lora_A and lora_B of {shapes}; expected two matrices"
        elif (shapes[0] or ())[0] != rank or (shapes[1] or ())[1] != rank:
            yield f"{layer} has lora_A and lora_B of {shapes}; expected rank {rank}"
        elif other := [tensor.dtype for tensor in pair if tensor and tensor.dtype not in _TYPES]:
            yield f"{layer} has the type {other[0]}; expected one of {', '.join(_TYPES)}"


def _of_pattern(pattern: object, layer: str, usual: Any) -> Any:  # noqa: ANN401
    """The value of a layer: that of the first name in `pattern` that its path ends with."""
    path = f".model.{layer}"
    found = pattern.items() if isinstance(pattern, Mapping) else ()
    return next((value for name, value in found if path.endswith(f".{name}")), usual)


def _misfits(
    adapter: Adapter, model: ModelFacts, max_rank: int, modules: Collection[str]
) -> Iterator[str]:
    if adapter.rank > max_rank:
        yield f"its rank is {adapter.rank}, above max_lora_rank {max_rank}; raise option.max_lora_rank"
    if others := sorted({*adapter.modules} - {*modules}) if modules else []:
        allowed = ", ".join(modules)
        yield f"it changes {', '.join(others)}; option.lora_target_modules has {allowed}: add them there"
    shapes = layer_shapes(model)
    all_layers = {
        f"layers.{i}.{path}": shape
        for i in range(min(model.num_layers or 0, _MOST_LAYERS))
        for path, shape in shapes.items()
    }
    if unknown := [layer for layer in adapter.layers if layer not in all_layers]:
        known = ", ".join(shapes) or "none whose sizes config.json has"
        yield f"it changes {some(unknown)}; the model has {model.num_layers} layers with {known}"
    for layer in adapter.layers:
        outputs, inputs = all_layers.get(layer, (0, 0))
        found = (adapter.tensors[layer, "B"].shape[0], adapter.tensors[layer, "A"].shape[1])
        if inputs and found != (outputs, inputs):
            yield f"{layer} has {found} outputs and inputs, the model's has {(outputs, inputs)}"
    yield from _unnamed(adapter, all_layers)


def _unnamed(adapter: Adapter, layers: Collection[str]) -> Iterator[str]:
    """Yield the differences between the layers that an adapter has and those that its configuration names."""
    if not adapter.config.get("target_modules"):
        yield "target_modules is empty or missing, and peft then chooses layers by the model's type; name them"
    expected = _expected(adapter.config, layers)
    if not adapter.layers or expected is None:
        return
    if missing := expected - {*adapter.layers}:
        yield f"it lacks the tensors of {some(sorted(missing))}"
    if more := {*adapter.layers}.intersection(layers) - expected:
        yield f"it has tensors of {some(sorted(more))}, which its target_modules or layers_to_transform leave out"


def _expected(config: Mapping[str, Any], layers: Collection[str]) -> set[str] | None:
    """The layers that a configuration names; None if it does so by a pattern or leaves some out."""
    targets, chosen = config.get("target_modules"), config.get("layers_to_transform")
    if not isinstance(targets, list) or config.get("exclude_modules"):
        return None
    numbers = {*_listed(chosen)}
    return {
        layer
        for layer in layers
        if not numbers or int(layer.split(".")[1]) in numbers
        if any(f".model.{layer}".endswith(f".{target}") for target in targets)
    }
