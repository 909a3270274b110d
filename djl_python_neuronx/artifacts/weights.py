"""The weights in a folder, in each form that a model comes in. Names and headers are read, no tensor is."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from djl_python_neuronx.artifacts.folder import AGAIN, Folder, is_plain_name, some
from djl_python_neuronx.artifacts.tensor_files import (
    TensorEntry,
    check_pickle,
    read_header,
    torch_name,
)
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

_LLAMA_LIKE = "embed_tokens.weight"
_GPT_LIKE = "wte.weight"
_EMBEDDINGS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3"), _LLAMA_LIKE),
        **dict.fromkeys(("gemma", "gemma2", "granite", "phi", "phi3", "opt"), _LLAMA_LIKE),
        **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "gpt_neo"), _GPT_LIKE),
        "gpt_neox": "embed_in.weight",
        "bloom": "word_embeddings.weight",
    }
)
"""Families whose layers all have the same tensors → the name that the input embedding ends with.

Source: transformers 4.45 to 5.23, the models' classes."""
_HEADS = ("lm_head.weight", "embed_out.weight")

_LAYER = re.compile(
    r"(?P<before>.*?\b(?:layers|layer|h|blocks|block))\.(?P<index>\d+)\.(?P<after>.+)"
)
# Tensors that are computed: old checkpoints have them, new ones do not, mended ones have some.
_COMPUTED = re.compile(r"(.*\.)?(inv_freq|masked_bias|attn\.bias|attention\.bias)")


def num_layers(config: Mapping[str, Any]) -> int | None:
    """Layers of the language model; None: config.json does not say."""
    text = config.get("text_config")
    for source in (text if isinstance(text, Mapping) else {}, config):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if type(source.get(key)) is int:
                return int(source[key])
    return None


def check_tensors(names: Collection[str], config: Mapping[str, Any], where: Path) -> None:
    """Compare the names of a whole checkpoint's tensors with its config.json.

    Raises:
        ArtifactError: some are missing; the message lists them.
    """
    model_type, expected = str(config.get("model_type")), num_layers(config)
    known = model_type in _EMBEDDINGS
    missing = _outer(names, config, model_type) if known else []
    layers = _main_layers(names)
    if expected and (layers or known):
        # Quantised layers differ: some are left as they were.
        alike = known and "quantization_config" not in config
        missing += _in_layers(layers, expected, alike=alike)
    if missing:
        msg = (
            f"the weights in {where} lack {len(missing)} tensors of a {model_type} model with {expected} layers "
            f"(config.json): {some(missing)}. Download the model again, or correct config.json."
        )
        raise ArtifactError(msg)


def _outer(names: Collection[str], config: Mapping[str, Any], model_type: str) -> list[str]:
    missing = []
    if not any(name.endswith(_EMBEDDINGS[model_type]) for name in names):
        missing.append(_EMBEDDINGS[model_type])
    heads = str(config.get("architectures")).count("ForCausalLM")
    # Left out, the setting means what the family's class says, which is not known here.
    if heads and config.get("tie_word_embeddings") is False:
        head = _HEADS[model_type == "gpt_neox"]
        if not any(name.startswith(head.removesuffix("weight")) for name in names):
            missing.append(head)
    return missing


def _main_layers(names: Collection[str]) -> tuple[str, dict[int, set[str]]] | None:
    """'model.layers' and, per layer, its tensors, for the list of layers that has the most of them."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        found = _LAYER.fullmatch(name)
        if found and not _COMPUTED.fullmatch(found["after"]):
            stacks[found["before"]][int(found["index"])].add(found["after"])
    if not stacks:
        return None
    return max(stacks.items(), key=lambda stack: sum(map(len, stack[1].values())))


def _in_layers(
    layers: tuple[str, dict[int, set[str]]] | None, expected: int, *, alike: bool
) -> list[str]:
    if layers is None:
        return [f"layers.{i}.*" for i in range(expected)]
    before, held = layers
    everywhere = set.union(*held.values()) if alike else set()
    missing = []
    for i in range(expected):
        if i not in held:
            missing.append(f"{before}.{i}.*")
        else:
            missing += [f"{before}.{i}.{after}" for after in sorted(everywhere - held[i])]
    return missing


WeightsKind = Literal["safetensors", "pickle", "split", "presharded", "ranks"]
"""How weights are laid out.

safetensors, pickle: whole, as Hugging Face saves them; a pickle may only be loaded weights-only. split: whole, one
`torch.save` file per tensor. presharded: cut, padded and transposed by transformers-neuronx for one tp degree. ranks:
cut by NxD for one tp degree, a file per rank.
"""

KEY_TO_FILENAME = "key_to_filename.json"
SPLIT_FOLDER = "pytorch_model.bin"
HEAD_FILE = "DecoderLMHead.safetensors"
# In this order, because the libraries do: hub folders often carry several kinds.
# Source: transformers-neuronx, module.py, load_state_dict_dir.
_WHOLE: tuple[tuple[str, WeightsKind], ...] = (
    ("model.safetensors", "safetensors"),
    ("model.safetensors.index.json", "safetensors"),
    (SPLIT_FOLDER, "pickle"),
    ("pytorch_model.bin.index.json", "pickle"),
)
_LAYER_FILE = re.compile(r"decoder_layer_(\d+)\.safetensors")


@dataclass(frozen=True)
class Weights:
    """Complete weights of a model."""

    folder: Path
    kind: WeightsKind
    dtype: str | None
    """Of most bytes, in torch's words (`bfloat16`); None: the files do not tell."""


def has_whole(folder: Folder) -> bool:
    """True if a folder is meant to hold weights that any backend can cut as it needs."""
    return any(name in folder.names for name, _ in _WHOLE)


def is_split(folder: Folder) -> bool:
    """True if the weights that the libraries would take are those of `save_pretrained_split`."""
    first = next((name for name, _ in _WHOLE if name in folder.names), None)
    return first == SPLIT_FOLDER and SPLIT_FOLDER in folder.folders


def read_whole(folder: Folder, config: Mapping[str, Any]) -> Weights:
    """The whole weights in a folder, checked to be complete for `config`.

    Raises:
        ArtifactNotFoundError: there are none, or files or tensors of them are missing.
        ArtifactError: a file is damaged or holds code.
    """
    if is_split(folder):
        return _read_split(folder, config)
    name, kind = next((one for one in _WHOLE if one[0] in folder.names), ("", None))
    if kind is None:
        raise _no_weights(folder)
    shards, indexed = _shards(folder, name), name.endswith(".index.json")
    tensors = {tensor for listed in shards.values() for tensor in listed}
    if kind == "pickle":
        for shard in shards:
            check_pickle(folder, shard)
        if indexed:  # the names in a lone file are seen by the loader only
            check_tensors(tensors, config, folder.path)
        return Weights(folder.path, kind, _config_dtype(config))
    headers = _read_headers(folder, shards)
    check_tensors({*tensors, *headers}, config, folder.path)
    _check_floating(headers, config, folder.path / name)
    return Weights(folder.path, kind, _main_dtype(headers.values()) or _config_dtype(config))


def whole_files(folder: Folder) -> list[str]:
    """Names of the files of whole weights, safetensors or pickles.

    Raises:
        ArtifactError: there are none, or the index of them is malformed or names missing ones.
    """
    for name, _ in _WHOLE:
        if name in folder.names:
            return sorted(_shards(folder, name))
    raise _no_weights(folder)


def has_presharded(folder: Folder) -> bool:
    """True if a folder is meant to hold weights that transformers-neuronx has cut."""
    return HEAD_FILE in folder.names or any(_LAYER_FILE.fullmatch(name) for name in folder.names)


def read_presharded(folder: Folder, config: Mapping[str, Any]) -> tuple[Weights, int]:
    """Weights of transformers-neuronx's `save(sharded_weights=True)`, and the tp degree that they are cut for.

    Source: transformers-neuronx, decoder.py, save_presharded_weights: tensor i of core j is `<name>*<j>`.

    Raises:
        ArtifactNotFoundError: the file of a layer is missing.
        ArtifactError: a file is damaged, or was cut for another tp degree than the others.
    """
    layers = num_layers(config)
    if layers is None:
        found = [_LAYER_FILE.fullmatch(name) for name in folder.names]
        layers = max((int(match[1]) + 1 for match in found if match), default=0)
    expected = [HEAD_FILE, *(f"decoder_layer_{i}.safetensors" for i in range(layers))]
    _require(folder, expected, f"presharded files of {layers} layers")
    degrees: dict[str, int] = {}
    entries: list[TensorEntry] = []
    for name in expected:
        header = read_header(folder.file(name))
        shards = [
            int(last) for _, _, last in (key.rpartition("*") for key in header) if last.isdecimal()
        ]
        if not shards or len(shards) < len(header):
            msg = f"{folder.path / name} has tensors that are no shards; expected names such as 'weight*0'. {AGAIN}"
            raise ArtifactError(msg)
        degrees[name] = max(shards) + 1
        entries += header.values()
    other = [name for name in expected if degrees[name] != degrees[HEAD_FILE]]
    if other:
        msg = (
            f"{folder.path / other[0]} is cut for tensor parallel degree {degrees[other[0]]}, {HEAD_FILE} for "
            f"{degrees[HEAD_FILE]}; two compilations went into one folder. Compile into an empty one."
        )
        raise ArtifactError(msg)
    return Weights(folder.path, "presharded", _main_dtype(entries)), degrees[HEAD_FILE]


def read_ranks(folder: Folder, ranks: Iterable[int]) -> Weights:
    """Weights that NxD has cut, one file per rank.

    Source: neuronx-distributed-inference, application_base.py, load_weights.

    Raises:
        ArtifactNotFoundError: the file of a rank is missing.
        ArtifactError: a file is damaged.
    """
    expected = [f"tp{rank}_sharded_checkpoint.safetensors" for rank in ranks]
    _require(folder, expected, "weight files of the ranks (neuron_config.json)")
    entries = [entry for name in expected for entry in read_header(folder.file(name)).values()]
    return Weights(folder.path, "ranks", _main_dtype(entries))


def read_key_to_filename(folder: Folder) -> dict[str, str]:
    """Tensor name → file name of split weights.

    Source: transformers-neuronx, module.py, save_split.

    Raises:
        ArtifactNotFoundError: the list, or a file in it, is missing.
        ArtifactError: the list is malformed or leaves the folder.
    """
    files = read_names(folder, KEY_TO_FILENAME, folder.json(KEY_TO_FILENAME))
    _require(
        folder, sorted(set(files.values())), f"files that {folder.path / KEY_TO_FILENAME} names"
    )
    return files


def read_names(folder: Folder, name: str, mapping: object) -> dict[str, str]:
    """A map of tensors to files in the same folder, as `name` gives it."""
    path = folder.path / name
    if not isinstance(mapping, dict) or not mapping:
        msg = f"{path} lists no tensors; expected tensor names mapped to files. Copy or download it again."
        raise ArtifactError(msg)
    for tensor, file in mapping.items():
        if not is_plain_name(file):
            msg = f"{path} maps {tensor!r} to {file!r}; expected the name of a file beside it. Correct the index."
            raise ArtifactError(msg)
    return mapping


def _no_weights(folder: Folder) -> ArtifactNotFoundError:
    return ArtifactNotFoundError(
        f"no weights in {folder.path}: expected {' or '.join(name for name, _ in _WHOLE)}; "
        f"found {some(sorted(folder.names))}. Copy the weights too, or download the model again."
    )


def _shards(folder: Folder, name: str) -> dict[str, list[str]]:
    """File name → names of its tensors where an index tells."""
    return _read_index(folder, name) if name.endswith(".index.json") else {name: []}


def _read_split(folder: Folder, config: Mapping[str, Any]) -> Weights:
    inner = folder.sub(SPLIT_FOLDER)
    inner.file(KEY_TO_FILENAME)
    files = read_key_to_filename(inner)
    for name in sorted(set(files.values())):
        check_pickle(inner, name)
    check_tensors(files.keys(), config, inner.path)
    return Weights(folder.path, "split", _config_dtype(config))


def _read_index(folder: Folder, name: str) -> dict[str, list[str]]:
    """Shard file name → names of its tensors; every one of the files is there."""
    weight_map = folder.json(name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        msg = f"{folder.path / name} has no weight_map; expected tensor names mapped to files. {AGAIN}"
        raise ArtifactError(msg)
    shards: dict[str, list[str]] = {}
    for tensor, shard in read_names(folder, name, weight_map).items():
        shards.setdefault(shard, []).append(tensor)
    _require(folder, sorted(shards), f"weight files that {folder.path / name} names")
    return shards


def _read_headers(folder: Folder, shards: Mapping[str, Iterable[str]]) -> dict[str, TensorEntry]:
    """All tensors of the shards, each of which holds those that the index says."""
    together: dict[str, TensorEntry] = {}
    for shard, tensors in shards.items():
        header = read_header(folder.path / shard)
        absent = sorted(set(tensors) - header.keys())
        if absent:
            msg = (
                f"{folder.path / shard} lacks tensors that the index places there: {some(absent)}. "
                "Index and weights are of different models; copy or download them again."
            )
            raise ArtifactError(msg)
        together |= header
    return together


def _require(folder: Folder, files: list[str], what: str) -> None:
    missing = [name for name in files if name not in folder.names]
    if missing:
        msg = f"{folder.path} lacks {len(missing)} of the {len(files)} {what}: {some(missing)}. {AGAIN}"
        raise ArtifactNotFoundError(msg)


def _check_floating(
    headers: Mapping[str, TensorEntry], config: Mapping[str, Any], path: Path
) -> None:
    """Integers are weights only where config.json says how they were quantised."""
    dtype = _main_dtype(headers.values())
    if (
        dtype
        and "float" not in dtype
        and not dtype.startswith("f")
        and "quantization_config" not in config
    ):
        msg = (
            f"{path}: most of the weights are of type {dtype}, and config.json has no quantization_config; expected "
            "floating point. Save the model again in bfloat16, or add the configuration it was quantised with."
        )
        raise ArtifactError(msg)


def _main_dtype(entries: Iterable[TensorEntry]) -> str | None:
    num_bytes: Counter[str] = Counter()
    for entry in entries:
        num_bytes[entry.dtype] += entry.end - entry.begin
    return torch_name(num_bytes.most_common(1)[0][0]) if num_bytes else None


def _config_dtype(config: Mapping[str, Any]) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None
