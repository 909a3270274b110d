"""Model folders that NxD Inference, or Optimum Neuron with its own version of it, have compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts.layouts.artifact import (
    Artifact,
    read_config,
    read_eos_ids,
    require_model_type,
)
from djl_python_neuronx.artifacts.layouts.compiled_tnx import read_checkpoint
from djl_python_neuronx.artifacts.layouts.folder import Folder, some
from djl_python_neuronx.artifacts.layouts.graphs import compiled_options
from djl_python_neuronx.artifacts.layouts.pickled import check_archive
from djl_python_neuronx.artifacts.layouts.weights import Weights, has_whole, read_ranks, read_whole
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

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
