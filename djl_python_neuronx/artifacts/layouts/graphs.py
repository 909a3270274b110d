"""Folders of compiled graphs: what transformers-neuronx saves, and the compilers' caches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from djl_python_neuronx.artifacts.layouts.folder import Folder, some, unreadable
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    UnknownFormatError,
)

JUMPSTART_FOLDER = "PRE_COMPILED_NEURON_GRAPH_INFER"
_CACHE_FOLDER = re.compile(r"neuronxcc-(?P<version>.+)")
_MODULE_FOLDER = re.compile(r"MODULE_.+")

_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("f32", "fp32", "float32", "torch.float32"), "float32"),
        **dict.fromkeys(("f16", "fp16", "float16", "torch.float16"), "float16"),
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    }
)


@dataclass(frozen=True)
class Graphs:
    """A folder of compiled graphs."""

    path: Path
    kind: Literal["neff", "cache"]
    """neff: `model.save` of transformers-neuronx, for `model.load`. cache: what NEURON_COMPILE_CACHE_URL may name."""
    num_graphs: int
    compiler_versions: frozenset[str]
    """Of a cache, by its folder names; a saved graph does not tell."""


def is_cache(folder: Folder) -> bool:
    """True if a folder is a compiler's cache or holds one of SageMaker JumpStart's."""
    return JUMPSTART_FOLDER in folder.folders or any(
        _CACHE_FOLDER.fullmatch(name) for name in folder.folders
    )


def detect_graphs(path: Path, *, origin: str = "option.compiled_graph_path") -> Graphs:
    """The compiled graphs in a local folder. `origin` tells in messages where the path came from.

    Raises:
        ArtifactNotFoundError: no such folder, or no graph in it.
        UnknownFormatError: no folder of graphs.
        ArtifactError: a file cannot be read or is cut off.
    """
    try:
        folder = Folder.open(path)
    except ArtifactError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        msg = f"the folder of compiled graphs {path} (from {origin}) does not exist. Correct {origin}, or mount it."
        raise ArtifactNotFoundError(msg) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if is_cache(folder):
        return _read_cache(folder)
    if num_graphs := check_neffs(folder):
        return Graphs(path, "neff", num_graphs, frozenset())
    msg = (
        f"{path} (from {origin}) holds no compiled graphs: looked for *.neff or neuronxcc-*/MODULE_*; found "
        f"{some(sorted(folder.names))}. Point to the folder that the compilation wrote."
    )
    raise UnknownFormatError(msg)


def check_neffs(folder: Folder) -> int:
    """How many graphs of transformers-neuronx a folder holds; each is there and not empty.

    Source: transformers-neuronx, base.py, _save_compiled_artifacts: `<digest of the HLO>.neff`.

    Raises:
        ArtifactError: one of them cannot be read, is empty or was never fetched.
    """
    return sum(
        folder.file(name).suffix == ".neff"
        for name in sorted(folder.names)
        if name.endswith(".neff")
    )


def require_neffs(folder: Folder) -> Path:
    """The path of a folder that must hold graphs.

    Raises:
        ArtifactNotFoundError: there are none.
        ArtifactError: one of them cannot be read, is empty or was never fetched.
    """
    if not check_neffs(folder):
        msg = (
            f"no compiled graphs in {folder.path}: expected *.neff, found {some(sorted(folder.names))}. "
            "The compilation was cut short, or the files were left behind: compile or copy it again."
        )
        raise ArtifactNotFoundError(msg)
    return folder.path


def torch_dtype(name: object) -> object:
    """Torch's word for a dtype however the library spelled it: `bfloat16` for `bf16`."""
    return _DTYPES.get(str(name), name)


def compiled_options(recorded: Mapping[str, object], keys: Mapping[str, str]) -> dict[str, object]:
    """Option name → value of what a library recorded; `keys` maps its words to ours. Nulls are not recorded."""
    found: dict[str, object] = {}
    for key, option in keys.items():
        value = recorded.get(key)
        if value is not None and option not in found:
            found[option] = (
                torch_dtype(value)
                if option == "dtype"
                else tuple(value)
                if isinstance(value, list)
                else value
            )
    return found


def _read_cache(folder: Folder) -> Graphs:
    inner = folder.sub(JUMPSTART_FOLDER) if JUMPSTART_FOLDER in folder.folders else folder
    versions = {
        match["version"] for name in inner.folders if (match := _CACHE_FOLDER.fullmatch(name))
    }
    num_graphs = 0
    for version in versions:
        modules = inner.sub(f"neuronxcc-{version}")
        for name in modules.folders:
            # A module without its graph is one whose compilation failed or still runs: the compiler makes it again.
            if _MODULE_FOLDER.fullmatch(name) and "model.neff" in modules.sub(name).names:
                modules.sub(name).file("model.neff")
                num_graphs += 1
    if not num_graphs:
        msg = f"the compile cache {inner.path} is empty: expected neuronxcc-*/MODULE_*/model.neff. Copy it again."
        raise ArtifactNotFoundError(msg)
    return Graphs(inner.path, "cache", num_graphs, frozenset(versions))
