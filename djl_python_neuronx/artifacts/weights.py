"""Weights in a folder, in each layout that a model comes in. Reads names and headers, no tensor."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from djl_python_neuronx.artifacts.folder import Folder, is_plain_name, some
from djl_python_neuronx.artifacts.tensor_files import (
    TensorEntry,
    check_pickles,
    read_headers,
    torch_name,
)
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.links import AGAIN

WeightsKind = Literal["safetensors", "pickle", "split", "presharded", "ranks"]
"""Layout of weights.

safetensors, pickle: whole, as Hugging Face saves them. split: whole, one `torch.save` file per tensor. presharded: cut,
padded and transposed by transformers-neuronx for one tp degree. ranks: cut by NxD for one tp degree, a file per rank.
"""

KEY_TO_FILENAME = "key_to_filename.json"
SPLIT_FOLDER = "pytorch_model.bin"
_INDEX = ".index.json"
_HEAD_FILE = "DecoderLMHead.safetensors"
_LAYER_FILE = re.compile(r"decoder_layer_(\d{1,5})\.safetensors")
MAX_LAYERS = 10_000
_CORE = re.compile(r"[0-9]{1,5}")
_MAX_LISTED = 10_000
# In the order of the libraries, because Hub folders often hold several kinds.
# Source: transformers-neuronx, module.py, load_state_dict_dir.
_WHOLE: dict[str, WeightsKind] = {
    "model.safetensors": "safetensors",
    "model.safetensors.index.json": "safetensors",
    SPLIT_FOLDER: "pickle",
    "pytorch_model.bin.index.json": "pickle",
}

_LLAMA_LIKE = "embed_tokens.weight"
_GPT_LIKE = "wte.weight"
_EMBEDDINGS: dict[str, str] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3"), _LLAMA_LIKE),
    **dict.fromkeys(("gemma", "gemma2", "granite", "phi", "phi3", "opt"), _LLAMA_LIKE),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "gpt_neo"), _GPT_LIKE),
    "gpt_neox": "embed_in.weight",
    "bloom": "word_embeddings.weight",
}
"""Families whose layers all have the same tensors -> end of the name of the input embedding.

Source: transformers 4.45 to 5.23, the models' classes."""
_HEADS = ("lm_head.weight", "embed_out.weight")
_EAGLE = "fc.weight"
"""The layer of an EAGLE draft that joins embeddings and states of the model; no whole model has it there."""
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LAYER = re.compile(
    r"(?P<before>.*?\b(?:layers|layer|h|blocks|block))\.(?P<index>\d{1,5})\.(?P<after>.+)"
)
# Computed tensors: old checkpoints have them, new ones do not, repaired ones have some.
_COMPUTED = re.compile(r"(.*\.)?(inv_freq|masked_bias|attn\.bias|attention\.bias)")


@dataclass(frozen=True)
class Weights:
    """Complete weights of a model."""

    folder: Path
    kind: WeightsKind
    dtype: str | None
    """Of most bytes, by torch's name (`bfloat16`); None if it is not recorded."""
    names: tuple[str, ...] = ()
    """The files, as paths in the folder."""
    eagle: bool = False
    """The layers of an EAGLE draft, which take the rest from the model that they draft for."""


def has_whole(folder: Folder) -> bool:
    """True if a folder is meant to hold weights that any backend can shard as it needs."""
    return not folder.names.isdisjoint(_WHOLE)


def is_split(folder: Folder) -> bool:
    """True if the weights that the libraries would read are those of `save_pretrained_split`."""
    first = next((name for name in _WHOLE if name in folder.names), None)
    return first == SPLIT_FOLDER and SPLIT_FOLDER in folder.folders


def read_whole(folder: Folder, config: Mapping[str, Any]) -> Weights:
    """The whole weights in a folder, checked to be complete for `config`.

    Raises:
        ArtifactNotFoundError: there are none, or files or tensors of them are missing.
        ArtifactError: a file is damaged or holds code.
    """
    recorded = config.get("dtype") or config.get("torch_dtype")
    dtype = recorded if isinstance(recorded, str) else None
    if is_split(folder):
        inner = folder.sub(SPLIT_FOLDER)
        inner.file(KEY_TO_FILENAME)
        files = read_key_to_filename(inner)
        check_pickles(inner, sorted(set(files.values())))
        check_tensors(files.keys(), config, inner.path)
        names = tuple(f"{SPLIT_FOLDER}/{name}" for name in sorted(set(files.values())))
        return Weights(folder.path, "split", dtype, names)
    kind, files = _whole_files(folder)
    names = tuple(sorted(set(files.values())))
    if kind == "pickle":
        check_pickles(folder, names)
        if "" not in files:  # without an index the names are in the pickle
            check_tensors(files.keys(), config, folder.path)
        return Weights(folder.path, kind, dtype, names)
    headers = _read_headers(folder, files)
    tensors = {*headers, *files} - {""}
    if not (eagle := _EAGLE in tensors):
        check_tensors(tensors, config, folder.path)
    main = _main_dtype(headers.values())
    if main and not main.startswith(("f", "bf")) and "quantization_config" not in config:
        msg = (
            f"{folder.path / min(files.values())}: most of the weights are of type {main}, and config.json "
            "has no quantization_config; expected floating point. Save the model again in bfloat16, or add the "
            "configuration it was quantised with."
        )
        raise ArtifactError(msg)
    return Weights(folder.path, kind, main or dtype, names, eagle)


def whole_file_names(folder: Folder) -> list[str]:
    """Names of the files of whole weights, safetensors or pickles.

    Raises:
        ArtifactError: there are none, or their index is malformed or names missing ones.
    """
    return sorted(set(_whole_files(folder)[1].values()))


def has_presharded(folder: Folder) -> bool:
    """True if a folder is meant to hold weights that transformers-neuronx has cut."""
    return _HEAD_FILE in folder.names or any(_LAYER_FILE.fullmatch(name) for name in folder.names)


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
    names = [_HEAD_FILE, *(f"decoder_layer_{i}.safetensors" for i in range(layers))]
    _require(folder, names, f"presharded files of {layers} layers")
    degrees: dict[str, int] = {}
    entries: list[TensorEntry] = []
    for name, header in zip(names, read_headers(map(folder.file, names)), strict=True):
        cores = [int(core) for key in header if _CORE.fullmatch(core := key.rpartition("*")[2])]
        if not cores or len(cores) < len(header):
            msg = f"{folder.path / name} has tensors that are not shards; expected names such as 'weight*0'. {AGAIN}"
            raise ArtifactError(msg)
        degrees[name] = max(cores) + 1
        entries += header.values()
    degree = degrees[_HEAD_FILE]
    if others := [name for name in names if degrees[name] != degree]:
        msg = (
            f"{folder.path / others[0]} is cut for tensor parallel degree {degrees[others[0]]}, {_HEAD_FILE} for "
            f"{degree}; two compilations went into one folder. Compile into an empty one."
        )
        raise ArtifactError(msg)
    return Weights(folder.path, "presharded", _main_dtype(entries), tuple(names)), degree


def read_ranks(folder: Folder, ranks: Iterable[int]) -> Weights:
    """Weights that NxD has cut, one file per rank.

    Source: neuronx-distributed-inference, application_base.py, load_weights.

    Raises:
        ArtifactNotFoundError: the file of a rank is missing.
        ArtifactError: a file is damaged.
    """
    names = [f"tp{rank}_sharded_checkpoint.safetensors" for rank in ranks]
    _require(folder, names, "weight files of the ranks (neuron_config.json)")
    headers = read_headers(map(folder.file, names))
    entries = [entry for header in headers for entry in header.values()]
    return Weights(folder.path, "ranks", _main_dtype(entries), tuple(names))


def read_key_to_filename(folder: Folder) -> dict[str, str]:
    """Tensor name -> file name of split weights.

    Source: transformers-neuronx, module.py, save_split.

    Raises:
        ArtifactNotFoundError: the list, or a file in it, is missing.
        ArtifactError: the list is malformed or leaves the folder.
    """
    return _read_names(folder, KEY_TO_FILENAME, folder.json(KEY_TO_FILENAME))


def _whole_files(folder: Folder) -> tuple[WeightsKind, dict[str, str]]:
    """Kind of the whole weights, and tensor name -> file name; of a lone file "" -> its name."""
    for name, kind in _WHOLE.items():
        if name in folder.names:
            if not name.endswith(_INDEX):
                return kind, {"": name}
            return kind, _read_names(folder, name, folder.json(name).get("weight_map"))
    msg = (
        f"no weights in {folder.path}: expected {' or '.join(_WHOLE)}; "
        f"found {some(sorted(folder.names))}. Copy the weights too, or download the model again."
    )
    raise ArtifactNotFoundError(msg)


def _read_names(folder: Folder, name: str, files: object) -> dict[str, str]:
    """The map of tensors to files beside it that the file `name` holds; all of the files exist."""
    path = folder.path / name
    if not isinstance(files, dict) or not files:
        msg = f"{path} has no weight_map: expected tensor names mapped to files. {AGAIN}"
        raise ArtifactError(msg)
    for tensor, file in files.items():
        if not is_plain_name(file):
            msg = (
                f"{path} maps {shortened(tensor)!r} to {shortened(file)!r}; expected the name of a file beside it. "
                "Correct the index."
            )
            raise ArtifactError(msg)
    _require(folder, sorted(set(files.values())), f"weight files that {path} names")
    return files


def _read_headers(folder: Folder, files: Mapping[str, str]) -> dict[str, TensorEntry]:
    """All tensors of the files, each of which holds those that the index places there."""
    together: dict[str, TensorEntry] = {}
    placed: dict[str, set[str]] = defaultdict(set)
    for tensor, name in files.items():
        placed[name].add(tensor)
    headers = read_headers(folder.path / name for name in placed)
    for (name, tensors), header in zip(placed.items(), headers, strict=True):
        if absent := sorted(tensors - header.keys() - {""}):
            msg = (
                f"{folder.path / name} lacks tensors that the index places there: {some(absent)}. "
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


def _main_dtype(entries: Iterable[TensorEntry]) -> str | None:
    """The type of most bytes, by torch's name."""
    num_bytes: Counter[str] = Counter()
    for entry in entries:
        num_bytes[entry.dtype] += entry.end - entry.begin
    return torch_name(num_bytes.most_common(1)[0][0]) if num_bytes else None


def num_layers(config: Mapping[str, Any]) -> int | None:
    """Layers of the language model, or None if config.json does not record them.

    Raises:
        ArtifactError: they are negative, or more than any model has.
    """
    text = config.get("text_config")
    for source in (text if isinstance(text, Mapping) else {}, config):
        for key in _NUM_LAYERS:
            layers = source.get(key)
            if type(layers) is int:
                if not 0 <= layers <= MAX_LAYERS:
                    msg = f"config.json gives {key} {shortened(layers)!s}; expected 1 to {MAX_LAYERS}. Correct it."
                    raise ArtifactError(msg)
                return layers
    return None


def limit_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the config.json of a model's first layers: its number of layers, and lists with an entry for each."""
    total, limited = num_layers(config), dict(config)
    for key, value in config.items():
        if key in _NUM_LAYERS:
            limited[key] = count
        elif isinstance(value, list) and len(value) == total:
            limited[key] = value[:count]
        elif key == "text_config" and isinstance(value, Mapping):
            limited[key] = limit_layers(value, count)
    return limited


def first_layers(names: Collection[str], count: int) -> list[str]:
    """Return the tensors of the first layers of the longest list of layers, and those outside of it."""
    found = {name: match for name in names if (match := _LAYER.fullmatch(name))}
    sizes = Counter(match["before"] for match in found.values())
    longest = max(sizes, key=sizes.__getitem__, default="")
    return [
        name
        for name in names
        if name not in found
        or found[name]["before"] != longest
        or int(found[name]["index"]) < count
    ]


def check_tensors(names: Collection[str], config: Mapping[str, Any], where: Path) -> None:
    """Compare the names of a whole checkpoint's tensors with its config.json, before anything is loaded.

    Of the families in `_EMBEDDINGS` all layers must be alike; of others each layer needs some tensor. The backend finds
    what is missed here, after minutes of loading. No library refuses layers beyond those of config.json: without them
    the answers are wrong.

    Raises:
        ArtifactError: some are missing, or of layers that config.json does not have; the message lists them.
    """
    model_type, expected = str(config.get("model_type")), num_layers(config)
    known = model_type in _EMBEDDINGS
    missing = _missing_outside(names, config, model_type) if known else []
    stacks = _layer_stacks(names)
    before, layers = max(
        stacks.items(), key=lambda stack: sum(map(len, stack[1].values())), default=("layers", {})
    )
    # Elsewhere one of several lists of layers may be a vision tower's or an encoder's, of another number.
    if expected and (known or len(stacks) == 1):
        _refuse_further_layers(before, layers, config, expected, where)
    if expected and (layers or known):
        # Quantised layers differ: some are left as they were.
        alike = known and "quantization_config" not in config
        everywhere = set().union(*layers.values()) if alike else set()
        for i in range(expected):
            absent = sorted(everywhere - layers[i]) if i in layers else ["*"]
            missing += [f"{before}.{i}.{after}" for after in absent]
            if len(missing) > _MAX_LISTED:
                break
    if missing:
        msg = (
            f"the weights in {where} lack {len(missing)} tensors of a {model_type} model with {expected} layers "
            f"(config.json): {some(missing)}. Download the model again, or correct config.json."
        )
        raise ArtifactError(msg)


def _missing_outside(
    names: Collection[str], config: Mapping[str, Any], model_type: str
) -> list[str]:
    """The input embedding and the head, if they are missing."""
    missing = []
    if not any(name.endswith(_EMBEDDINGS[model_type]) for name in names):
        missing.append(_EMBEDDINGS[model_type])
    is_causal = "ForCausalLM" in str(config.get("architectures"))
    # Without the setting the family's class decides, which is not known here.
    if is_causal and config.get("tie_word_embeddings") is False:
        head = _HEADS[model_type == "gpt_neox"]
        if not any(name.startswith(head.removesuffix("weight")) for name in names):
            missing.append(head)
    return missing


def _refuse_further_layers(
    before: str,
    layers: Mapping[int, Collection[str]],
    config: Mapping[str, Any],
    expected: int,
    where: Path,
) -> None:
    drafting = config.get("num_nextn_predict_layers")  # behind the others, read by few libraries
    most = expected + (drafting if type(drafting) is int and drafting > 0 else 0)
    if further := [f"{before}.{index}.*" for index in sorted(layers) if index >= most]:
        msg = (
            f"the weights in {where} have {len(further)} layers more than the {expected} of config.json "
            f"(num_hidden_layers or n_layer): {some(further)}. Correct config.json, or download the model again."
        )
        raise ArtifactError(msg)


def _layer_stacks(names: Collection[str]) -> Mapping[str, Mapping[int, set[str]]]:
    """'model.layers' and, per layer, its tensors, for each list of layers."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        found = _LAYER.fullmatch(name)
        if found and not _COMPUTED.fullmatch(found["after"]):
            stacks[found["before"]][int(found["index"])].add(found["after"])
    return stacks
