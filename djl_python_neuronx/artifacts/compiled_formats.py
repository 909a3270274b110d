"""Folders of compiled graphs: what transformers-neuronx saves, and the compilers' caches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from djl_python_neuronx.artifacts.artifact import (
    Artifact,
    read_config,
    read_eos_ids,
    require_model_type,
)
from djl_python_neuronx.artifacts.folder import AGAIN, Folder, some, unreadable
from djl_python_neuronx.artifacts.tensor_files import check_archive
from djl_python_neuronx.artifacts.weights import (
    Weights,
    has_presharded,
    has_whole,
    read_presharded,
    read_ranks,
    read_whole,
)
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


_TP = "tensor_parallel_degree"
# Source: LMI before djl-serving 1132e3ab, model_loader.py, update_model_config_to_neuron; Optimum Neuron 0.0.16 to
# 0.1, modeling_decoder.py: the section "neuron" of config.json.
_SECTION: Mapping[str, str] = MappingProxyType(
    {
        "num_cores": _TP,
        "batch_size": "max_rolling_batch_size",
        "sequence_length": "n_positions",
        "auto_cast_type": "dtype",
        "compiler_version": "compiler_version",
    }
)
# Source: Optimum Neuron 0.2, backends/hlo/config.py.
_HLO_CONFIG: Mapping[str, str] = MappingProxyType(
    {
        "tp_degree": _TP,
        "batch_size": "max_rolling_batch_size",
        "sequence_length": "n_positions",
        "n_positions": "n_positions",
        "auto_cast_type": "dtype",
        "amp": "dtype",
        "neuronxcc_version": "compiler_version",
    }
)


class Presharded:
    """What `model.save(folder, sharded_weights=True)` of transformers-neuronx writes."""

    name = "tnx_presharded"
    looks_for = "DecoderLMHead.safetensors (presharded by transformers-neuronx)"
    over: frozenset[str] = frozenset({"huggingface"})

    def matches(self, folder: Folder) -> bool:
        """True if there is a file of cut weights, or config.json says that there should be."""
        return has_presharded(folder) or bool(
            folder.json("config.json").get("is_presharded_checkpoint")
        )

    def read(self, folder: Folder) -> Artifact:
        """Cut weights, and the graphs beside them if there are any."""
        config = read_config(folder)
        weights, degree = _read_presharded(folder, config)
        return Artifact(
            path=folder.path,
            format=self.name,
            backend="tnx",
            config=config,
            eos_ids=read_eos_ids(folder, config),
            weights=(weights, *_whole_beside(folder, config)),
            compiled=folder.path if check_neffs(folder) else None,
            compiled_for={_TP: degree, **_read_version(folder, {})},
        )


class CompileOnly(Presharded):
    """The old LMI container's partition with `partition_schema=compile_only`: no tokenizer comes with it."""

    name = "lmi_compile_only"
    looks_for = "DecoderLMHead.safetensors and VERSION (LMI, compile_only)"
    over = frozenset({"huggingface", "tnx_presharded"})

    def matches(self, folder: Folder) -> bool:
        """True if the container's VERSION lies beside cut weights."""
        return "VERSION" in folder.names and super().matches(folder)

    def read(self, folder: Folder) -> Artifact:
        """As without VERSION, but graphs must be there."""
        require_neffs(folder)
        return super().read(folder)


class LmiAot:
    """The old LMI container's partition: configuration and tokenizer, and all that is compiled in `compiled/`."""

    name = "lmi_aot"
    looks_for = "compiled/ (LMI, ahead of time)"
    over: frozenset[str] = frozenset({"huggingface"})

    def matches(self, folder: Folder) -> bool:
        """True if there is a `compiled/`, or config.json says that there should be and no whole weights are there."""
        return "compiled" in folder.names or (
            not has_whole(folder) and "neuron" in folder.json("config.json")
        )

    def read(self, folder: Folder) -> Artifact:
        """The graphs in `compiled/` and the weights there, or else the whole ones of the folder."""
        config, inner = read_config(folder), folder.sub("compiled")
        compiled_for = _read_section(config)
        compiled_for |= _read_version(inner, compiled_for)
        weights: tuple[Weights, ...] = ()
        if has_presharded(inner) or not (has_whole(inner) or has_whole(folder)):
            cut, degree = _read_presharded(inner, config)
            if compiled_for.setdefault(_TP, degree) != degree:
                msg = (
                    f"{folder.path / 'config.json'} says that the model was compiled for {compiled_for[_TP]} cores, "
                    f"the weights in {inner.path} are cut for {degree}; two outputs were mixed. "
                    "Partition the model again."
                )
                raise ArtifactError(msg)
            weights = (cut,)
        elif has_whole(inner):
            weights = (read_whole(inner, config),)
        return Artifact(
            path=folder.path,
            format=self.name,
            backend="tnx",
            config=config,
            eos_ids=read_eos_ids(folder, config),
            weights=(*weights, *_whole_beside(folder, config)),
            compiled=require_neffs(inner),
            compiled_for=compiled_for,
        )


class OptimumTnx:
    """Optimum Neuron on transformers-neuronx (to 0.2): `checkpoint/` holds whole weights, `compiled/` graphs.

    From 0.1 on it had its own copy of that library, whose graphs the original does not find by their digest: of
    those folders (neuron_config.json) only the weights are of use.
    """

    name = "optimum_tnx"
    looks_for = "checkpoint/ and compiled/ (Optimum Neuron, transformers-neuronx)"
    over: frozenset[str] = frozenset({"huggingface", "lmi_aot"})

    def matches(self, folder: Folder) -> bool:
        """True if config.json's section "neuron" is Optimum's, or neuron_config.json is of its own library."""
        if _is_hlo(folder):
            return True
        section = folder.json("config.json").get("neuron")
        return isinstance(section, dict) and (
            "checkpoint" in folder.names or bool(section.get("checkpoint_id")) or "task" in section
        )

    def read(self, folder: Folder) -> Artifact:
        """Graphs and weights, or where the weights are to be had."""
        config, compiled = read_config(folder), folder.sub("compiled")
        require_neffs(compiled)
        own = _is_hlo(folder)
        recorded = folder.json("neuron_config.json") if own else config["neuron"]
        weights, source = read_checkpoint(folder, config, recorded)
        return Artifact(
            path=folder.path,
            format=self.name,
            backend="tnx",
            config=config,
            eos_ids=read_eos_ids(folder, config),
            weights=weights,
            compiled=None if own else compiled.path,
            compiled_for={} if own else compiled_options(recorded, _SECTION),
            weights_source=source,
        )


class NeffCache:
    """A compiler's cache, which is no model: refused with what it is good for."""

    name = "neff_cache"
    looks_for = "neuronxcc-*/MODULE_* (a compile cache)"
    over: frozenset[str] = frozenset()

    def matches(self, folder: Folder) -> bool:
        """True if there are modules by compiler version and no model is with them."""
        return is_cache(folder) and "config.json" not in folder.names

    def read(self, folder: Folder) -> Artifact:
        """Nothing to serve.

        Raises:
            UnknownFormatError: always.
        """
        msg = (
            f"{folder.path} is a compile cache ({some(sorted(folder.names))}), not a model. Name it in "
            "NEURON_COMPILE_CACHE_URL or option.compiled_graph_path, and the model itself in option.model_id."
        )
        raise UnknownFormatError(msg)


def read_checkpoint(
    folder: Folder, config: Mapping[str, Any], recorded: Mapping[str, Any]
) -> tuple[tuple[Weights, ...], str | None]:
    """Whole weights of an Optimum folder, else the hub id that it took them from.

    Raises:
        ArtifactNotFoundError: neither is there.
        ArtifactError: the weights are damaged.
    """
    if "checkpoint" in folder.names:
        return (read_whole(folder.sub("checkpoint"), config),), None
    if has_whole(folder):
        return (read_whole(folder, config),), None
    source, revision = recorded.get("checkpoint_id"), recorded.get("checkpoint_revision")
    if not isinstance(source, str):
        msg = (
            f"{folder.path} has no weights: expected checkpoint/, or a checkpoint_id that tells where they are; found "
            f"{some(sorted(folder.names))}. Copy the whole folder again."
        )
        raise ArtifactNotFoundError(msg)
    return (), f"{source}@{revision}" if revision else source


def _is_hlo(folder: Folder) -> bool:
    return folder.json("neuron_config.json").get("_serialized_key") == "HloNeuronConfig"


def _read_presharded(folder: Folder, config: Mapping[str, Any]) -> tuple[Weights, int]:
    found = read_presharded(folder, config)
    # Source: transformers-neuronx, module.py: without it from_pretrained looks for whole weights.
    if not folder.json("config.json").get("is_presharded_checkpoint"):
        msg = (
            f"{folder.path / 'config.json'} is missing or another file was copied over it: expected "
            "is_presharded_checkpoint=true, without which transformers-neuronx does not take the weights beside it. "
            "Copy the compiled folder again, or add the setting."
        )
        raise ArtifactError(msg)
    return found


def _whole_beside(folder: Folder, config: Mapping[str, Any]) -> tuple[Weights, ...]:
    return (read_whole(folder, config),) if has_whole(folder) else ()


def _read_section(config: Mapping[str, Any]) -> dict[str, object]:
    section = config.get("neuron")
    return compiled_options(section, _SECTION) if isinstance(section, dict) else {}


def _read_version(folder: Folder, recorded: Mapping[str, object]) -> dict[str, object]:
    """The compiler's version by the container's VERSION file, which must agree with what else is recorded."""
    if "VERSION" not in folder.names:
        return {}
    path = folder.file("VERSION")
    try:
        version = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise unreadable(path, error) from error
    other = recorded.get("compiler_version", version)
    if other != version:
        msg = f"{path} names compiler {version!r}, config.json {other!r}; two outputs were mixed. {AGAIN}"
        raise ArtifactError(msg)
    return {"compiler_version": version}


_CONFIG = "neuron_config.json"
_MODEL = "model.pt"
_OPTIMUM_MODEL = re.compile(r"model(_[\w-]+)?\.pt")

# Source: neuronx-distributed-inference, models/config.py, NeuronConfig.
_NXDI: Mapping[str, str] = MappingProxyType(
    {
        "tp_degree": "tensor_parallel_degree",
        "batch_size": "max_rolling_batch_size",
        "seq_len": "n_positions",
        "torch_dtype": "dtype",
        "context_encoding_buckets": "context_length_estimate",
    }
)
# Source: Optimum Neuron 0.3, models/inference/backend/config.py and configuration_utils.py.
_OPTIMUM: Mapping[str, str] = MappingProxyType(
    {
        "tp_degree": "tensor_parallel_degree",
        "batch_size": "max_rolling_batch_size",
        "sequence_length": "n_positions",
        "torch_dtype": "dtype",
        "neuronxcc_version": "compiler_version",
    }
)


def _is_optimum(recorded: Mapping[str, Any]) -> bool:
    return "_serialized_key" in recorded or "optimum_neuron_version" in recorded


class Nxdi:
    """What `compile(folder)` of NxD Inference writes, with or without the checkpoint beside it."""

    name = "nxdi"
    looks_for = "model.pt and neuron_config.json (NxD Inference)"
    over: frozenset[str] = frozenset({"huggingface"})

    def matches(self, folder: Folder) -> bool:
        """True if there is its configuration, or its graphs alone without whole weights."""
        if _CONFIG in folder.names:
            return not _is_optimum(folder.json(_CONFIG))
        return _MODEL in folder.names and not has_whole(folder)

    def read(self, folder: Folder) -> Artifact:
        """Graphs, and the weights of each rank if they were saved, else whole ones or where these were."""
        whole = folder.json(folder.file(_CONFIG).name)
        recorded = whole.get("neuron_config")
        if not isinstance(recorded, dict):
            msg = (
                f"{folder.path / _CONFIG} has no section neuron_config; expected what NxD Inference writes. "
                "Compile the model again."
            )
            raise ArtifactError(msg)
        if _MODEL not in folder.names:
            msg = (
                f"{folder.path / _MODEL} is missing although {_CONFIG} is there: the compilation was cut short. "
                f"Compile again, or remove {_CONFIG} to serve the checkpoint."
            )
            raise ArtifactNotFoundError(msg)
        check_archive(folder, _MODEL)
        config = (
            read_config(folder)
            if "config.json" in folder.names
            else require_model_type(
                {key: value for key, value in whole.items() if key != "neuron_config"},
                folder,
                _CONFIG,
            )
        )
        cut = (_read_ranks(folder, recorded),) if recorded.get("save_sharded_checkpoint") else ()
        beside = (read_whole(folder, config),) if has_whole(folder) else ()
        source = whole.get("_name_or_path") or None
        if not cut and not beside and source is None:
            msg = (
                f"{folder.path} has no weights: expected weights/, or the checkpoint beside {_MODEL}; found "
                f"{some(sorted(folder.names))}. Put the model's safetensors files into it."
            )
            raise ArtifactNotFoundError(msg)
        return Artifact(
            path=folder.path,
            format=self.name,
            backend="nxdi",
            config=config,
            eos_ids=read_eos_ids(folder, config),
            weights=(*cut, *beside),
            compiled=folder.path,
            compiled_for=compiled_options(recorded, _NXDI),
            weights_source=None if cut or beside else str(source),
        )


class OptimumNxd:
    """Optimum Neuron from 0.3 on: as NxD Inference's, with a configuration and places of its own."""

    name = "optimum_nxd"
    looks_for = "model.pt and Optimum's neuron_config.json"
    over: frozenset[str] = frozenset({"huggingface"})

    def matches(self, folder: Folder) -> bool:
        """True if neuron_config.json is Optimum's for NxD."""
        recorded = folder.json(_CONFIG)
        return _is_optimum(recorded) and recorded.get("_serialized_key") != "HloNeuronConfig"

    def read(self, folder: Folder) -> Artifact:
        """Graphs, and weights in `checkpoint/`, cut or whole, or where these were."""
        config, recorded = read_config(folder), folder.json(_CONFIG)
        graphs = sorted(name for name in folder.names if _OPTIMUM_MODEL.fullmatch(name))
        for name in graphs or [_MODEL]:
            check_archive(folder, name)
        inner = folder.sub("checkpoint") if "checkpoint" in folder.folders else None
        weights: tuple[Weights, ...]
        if inner is not None and "weights" in inner.names:
            weights, source = (_read_ranks(inner, recorded),), None
        else:
            weights, source = read_checkpoint(folder, config, recorded)
        return Artifact(
            path=folder.path,
            format=self.name,
            backend="nxdi",
            config=config,
            eos_ids=read_eos_ids(folder, config),
            weights=weights,
            compiled=folder.path,
            compiled_for=compiled_options(recorded, _OPTIMUM),
            weights_source=source,
        )


def _read_ranks(folder: Folder, recorded: Mapping[str, Any]) -> Weights:
    """The weights of the ranks that this host runs; by default of all."""
    first = recorded.get("start_rank_id") or 0
    count = recorded.get("local_ranks_size") or recorded.get("tp_degree")
    if type(first) is not int or type(count) is not int or not 0 < count <= 4096:
        msg = (
            f"{folder.path}: {_CONFIG} gives start_rank_id {first!r} and local_ranks_size or tp_degree {count!r}; "
            "expected numbers of ranks. Compile the model again."
        )
        raise ArtifactError(msg)
    return read_ranks(folder.sub("weights"), range(first, first + count))
