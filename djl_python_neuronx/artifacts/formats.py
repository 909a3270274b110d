"""What is in a model folder. Only looks: no weight is read, nothing is written.

A format is one class in `FORMATS`. Each says for itself, from the names in the folder, whether the folder is one of
its own, so a new format never edits another; a folder that two of them claim is an error, not a race.
"""

from __future__ import annotations

import json
import logging
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    UnknownFormatError,
)

logger = logging.getLogger(__name__)

# Source: safetensors 0.4 to 0.6, MAX_HEADER_SIZE: its readers refuse longer headers.
_MAX_HEADER_BYTES = 100_000_000

# Safetensors' dtype names to torch's; the others (F8 variants, integers) keep their own in lower case.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Artifact:
    """A model folder whose format is known and whose files are complete."""

    path: Path
    format: str
    backend: str | None
    """The only backend that can load it; None: any that knows the architecture."""
    config: Mapping[str, Any]
    """config.json"""
    eos_ids: frozenset[int]
    """Ids that end a sequence: generation_config.json's, else config.json's; empty if neither has any."""
    kind: Literal["safetensors", "pickle"]
    """`pickle` files may only be loaded weights-only: the full loader runs code from the file."""
    dtype: str | None
    """Of most bytes of the checkpoint, in torch's words (`bfloat16`); None: the files do not tell."""

    @property
    def model_type(self) -> str:
        """What the library calls the model's family: `llama`, `gpt2`."""
        return str(self.config["model_type"])

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names that the checkpoint was saved from; may be empty."""
        names = self.config.get("architectures")
        listed = names if isinstance(names, list) else [names]
        return tuple(name for name in listed if isinstance(name, str))


class Format(Protocol):
    """One way to lay out a model folder."""

    name: str
    looks_for: str
    """What makes a folder one of these, for the message when nothing fits."""

    def matches(self, names: frozenset[str]) -> bool:
        """True if a folder with these file names is meant to be of this format, complete or not."""

    def read(self, folder: Path, names: frozenset[str]) -> Artifact:
        """The facts of a folder that matches.

        Raises:
            ArtifactError: a file is missing, unreadable, malformed or cut off.
        """


class HuggingFace:
    """config.json beside whole weights, as `save_pretrained` writes them and the hub stores them."""

    name = "huggingface"
    looks_for = "config.json (a Hugging Face model)"

    # In this order, because the libraries do: hub folders often carry both kinds.
    _WEIGHTS: tuple[tuple[str, Literal["safetensors", "pickle"]], ...] = (
        ("model.safetensors", "safetensors"),
        ("model.safetensors.index.json", "safetensors"),
        ("pytorch_model.bin", "pickle"),
        ("pytorch_model.bin.index.json", "pickle"),
    )

    def matches(self, names: frozenset[str]) -> bool:
        """True if there is a config.json."""
        return "config.json" in names

    def read(self, folder: Path, names: frozenset[str]) -> Artifact:
        """Configuration, list of weight files and, for safetensors, their headers checked against their sizes."""
        config = read_json(folder / "config.json")
        if not isinstance(config.get("model_type"), str):
            msg = f"{folder / 'config.json'} names no model_type; expected one such as 'llama'. Is it a language model?"
            raise ArtifactError(msg)
        name, kind = self._choose_weights(folder, names)
        shards = _read_index(folder / name) if name.endswith(".index.json") else {name: ()}
        missing = sorted(shards.keys() - names)
        if missing:
            msg = (
                f"{len(missing)} of {len(shards)} weight files that {folder / name} names are missing: "
                f"{_some(missing)}. Copy or download the model again."
            )
            raise ArtifactNotFoundError(msg)
        dtype = config.get("dtype") or config.get("torch_dtype")
        if kind == "safetensors":
            dtype = _check_safetensors(folder, shards) or dtype
        return Artifact(
            path=folder,
            format=self.name,
            backend=None,
            config=config,
            eos_ids=_eos_ids(folder, names, config),
            kind=kind,
            dtype=dtype if isinstance(dtype, str) else None,
        )

    def _choose_weights(
        self, folder: Path, names: frozenset[str]
    ) -> tuple[str, Literal["safetensors", "pickle"]]:
        for name, kind in self._WEIGHTS:
            if name in names:
                return name, kind
        msg = (
            f"no weights in {folder}: expected {' or '.join(name for name, _ in self._WEIGHTS)}; "
            f"found {_some(sorted(names))}. Copy the weights too, or download the model again."
        )
        raise ArtifactNotFoundError(msg)


FORMATS: tuple[Format, ...] = (HuggingFace(),)


def detect(folder: Path, *, origin: str = "option.model_id") -> Artifact:
    """The artifact in a local folder. `origin` tells in messages where the path came from.

    Links may leave the folder: in the hub's cache every file is a link to a blob.

    Raises:
        ArtifactNotFoundError: no such folder, or no weights in it.
        ArtifactAccessError: something in it cannot be read.
        UnknownFormatError: nothing that this package can serve.
        ArtifactError: two formats fit, or a file is malformed or cut off.
    """
    try:
        names = frozenset(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is a file" if isinstance(error, NotADirectoryError) else "does not exist"
        msg = f"the model folder {folder} (from {origin}) {what}; expected a folder. Correct {origin}, or mount it."
        raise ArtifactNotFoundError(msg) from error
    except OSError as error:
        msg = f"the model folder {folder} (from {origin}) cannot be read: {error.strerror}. Give this user access."
        raise ArtifactAccessError(msg) from error
    fitting = [candidate for candidate in FORMATS if candidate.matches(names)]
    if not fitting:
        msg = (
            f"the folder {folder} (from {origin}) is in no known format: looked for "
            f"{' or '.join(known.looks_for for known in FORMATS)}; found {_some(sorted(names))}. "
            "Point to the folder that holds the model itself."
        )
        raise UnknownFormatError(msg)
    if len(fitting) > 1:
        listed = " and ".join(f"{one.name} ({one.looks_for})" for one in fitting)
        msg = f"the folder {folder} (from {origin}) fits several formats: {listed}. Keep one model per folder."
        raise ArtifactError(msg)
    return fitting[0].read(folder, names)


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "nothing") + more


def _unreadable(path: Path, error: OSError) -> ArtifactError:
    if isinstance(error, FileNotFoundError):
        return ArtifactNotFoundError(
            f"{path} is a link to a file that is gone. Copy or download the model again."
        )
    return ArtifactAccessError(
        f"{path} cannot be read: {error.strerror}. Give this user access, or copy it again."
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        ArtifactAccessError: it cannot be read.
        ArtifactError: it is malformed.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not valid JSON: {error}. Copy or download it again."
        raise ArtifactError(msg) from error
    if not isinstance(value, dict):
        msg = f"{path} holds a JSON {type(value).__name__}; expected an object. Copy or download it again."
        raise ArtifactError(msg)
    return value


def _eos_ids(folder: Path, names: frozenset[str], config: Mapping[str, Any]) -> frozenset[int]:
    """The first file's that has any; ids beyond the vocabulary are dropped, as the model never gives them.

    In a model of several modalities, `text_config` is the part that describes the language model.
    """
    name = "generation_config.json"
    generation = read_json(folder / name) if name in names else {}
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else {}
    vocab_size = config.get("vocab_size", text.get("vocab_size"))
    for source in (generation, config, text):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            msg = f"eos_token_id is {value!r} in {folder}; expected an id or a list of ids. Correct the file."
            raise ArtifactError(msg)
        beyond = {i for i in ids if isinstance(vocab_size, int) and i >= vocab_size}
        if beyond:
            logger.warning("eos_ids_unused ids=%s vocab_size=%d", sorted(beyond), vocab_size)
        if set(ids) - beyond:
            return frozenset(ids) - beyond
    return frozenset()


def _read_index(path: Path) -> dict[str, tuple[str, ...]]:
    """Shard file name → names of its tensors."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        msg = f"{path} has no weight_map; expected tensor names mapped to files. Copy or download it again."
        raise ArtifactError(msg)
    shards: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            msg = f"{path} maps {tensor!r} to {shard!r}; expected the name of a file beside it. Correct the index."
            raise ArtifactError(msg)
        shards.setdefault(shard, []).append(tensor)
    return {shard: tuple(tensors) for shard, tensors in shards.items()}


def _check_safetensors(folder: Path, shards: Mapping[str, Iterable[str]]) -> str | None:
    """The dtype of most bytes. Checks that each shard is whole and holds the tensors that the index says."""
    num_bytes: Counter[str] = Counter()
    for shard, tensors in shards.items():
        header = _read_header(folder / shard)
        absent = sorted(set(tensors) - header.keys())
        if absent:
            msg = (
                f"{folder / shard} lacks tensors that the index places there: {_some(absent)}. "
                "Index and weights are of different models; copy or download them again."
            )
            raise ArtifactError(msg)
        for dtype, begin, end in header.values():
            num_bytes[dtype] += end - begin
    if not num_bytes:
        return None
    dtype = num_bytes.most_common(1)[0][0]
    return _DTYPES.get(dtype, dtype.lower())


def _read_header(path: Path) -> dict[str, tuple[str, int, int]]:
    """Tensor name → (dtype, first byte, end) of a safetensors file, checked against the size of the file.

    Source: the safetensors format: uint64 little-endian length, a JSON header of that length, then the data.
    """
    try:
        actual = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            raw = file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise _unreadable(path, error) from error
    if start == b"version ":
        msg = f"{path} is a Git LFS pointer of {actual} bytes, not the weights; run `git lfs pull` in its repository."
        raise ArtifactError(msg)
    if len(start) < 8 or len(raw) < header_bytes:
        raise _wrong_size(path, f"at least {8 + header_bytes}", actual)
    header = _parse_header(path, raw)
    expected = 8 + header_bytes + max((end for _, _, end in header.values()), default=0)
    if actual != expected:
        raise _wrong_size(path, str(expected), actual)
    return header


def _parse_header(path: Path, raw: bytes) -> dict[str, tuple[str, int, int]]:
    """As `_read_header`; the tensors lie one after the other, as the format demands."""
    header = {}
    try:
        for name, entry in json.loads(raw).items():
            if name != "__metadata__":
                begin, end = map(operator.index, entry["data_offsets"])
                header[name] = (entry["dtype"].upper(), begin, end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"{path} has a malformed safetensors header; expected dtype and data_offsets per tensor. Copy it again."
        raise ArtifactError(msg) from error
    free = 0
    for begin, end in sorted(place for _, *place in header.values()):
        if begin != free or end < begin:
            msg = (
                f"{path} has a malformed safetensors header: a tensor lies at bytes {begin} to {end}, "
                f"expected it from {free} on. Copy or download it again."
            )
            raise ArtifactError(msg)
        free = end
    return header


def _wrong_size(path: Path, expected: str, actual: int) -> ArtifactError:
    msg = (
        f"{path} is cut off or damaged: its header asks for {expected} bytes, the file has {actual}. "
        "Copy or download it again."
    )
    return ArtifactError(msg)
