"""Compiled model folders of transformers-neuronx, NxD Inference, the old LMI container and Optimum Neuron."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.artifact import (
    Artifact,
    Format,
    read_config,
    require_model_type,
)
from djl_python_neuronx.artifacts.folder import Folder, reading, some
from djl_python_neuronx.artifacts.manifest import FILE_NAME as MANIFEST
from djl_python_neuronx.artifacts.tensor_files import check_archive
from djl_python_neuronx.artifacts.weights import (
    Weights,
    has_presharded,
    has_whole,
    read_presharded,
    read_ranks,
    read_whole,
)
from djl_python_neuronx.config.sources import from_file
from djl_python_neuronx.config.values import long_dtype, make_buckets, shortened
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    UnknownFormatError,
)
from djl_python_neuronx.links import AGAIN
from djl_python_neuronx.planning.nxdi.fields import other_fields
from djl_python_neuronx.planning.nxdi.recorded import as_options

_JUMPSTART_FOLDER = "PRE_COMPILED_NEURON_GRAPH_INFER"
_CACHE_FOLDER = re.compile(rf"{_JUMPSTART_FOLDER}|neuronxcc-.+")
NEURON_CONFIG = "neuron_config.json"
"""The library's record of a compile."""
_MODEL = "model.pt"
_VLLM = "neuron-compiled-artifacts"
_GRAPH_FOLDERS = frozenset({_VLLM, "compiled"})
_SAVED_MODEL = re.compile(rf"({_VLLM}/)?([0-9a-f]{{32}}/)?{re.escape(_MODEL)}")
_MAX_RANKS = 4096

_TP = "tensor_parallel_degree"
_OWN_CLASS = "it compiles this model_type with its own class"
_NO_PREFILL = "it compiles no graphs for prompts of a gpt2"
# A library's name of a setting -> ours.
# Source: LMI before djl-serving 1132e3ab, model_loader.py, update_model_config_to_neuron; Optimum Neuron 0.0.16 to
# 0.1, modeling_decoder.py: the section "neuron" of config.json.
_SECTION = {
    "num_cores": _TP,
    "batch_size": "max_rolling_batch_size",
    "sequence_length": "n_positions",
    "auto_cast_type": "dtype",
    "compiler_version": "compiler_version",
}
# What the section leaves out follows from the release, which is known by the transformers that it installs.
# Least version of transformers -> releases, fuse_qkv, and model types whose graphs are not used, with the reason.
# Source: Optimum Neuron 0.0.17 to 0.0.28, setup.py, modeling_decoder.py, exporters/neuron/model_configs.
_OPTIMUM: dict[tuple[int, ...], tuple[str, bool, dict[str, str]]] = {
    (4, 48): ("0.0.28", True, dict.fromkeys(("granite", "llama", "qwen2"), _OWN_CLASS)),
    (4, 43): ("0.0.25 to 0.0.27", True, {"qwen2": _OWN_CLASS}),
    (4, 41): ("0.0.23 and 0.0.24", False, {"mixtral": "the two compile it in different ways"}),
}
_JOINS = "continuous_batching"
_CONTINUOUS = frozenset({"llama", "mistral"})
"""Model types that Optimum Neuron and the old LMI container compile for continuous batching, with one length for
decodes, if there are several slots."""


def graphs_in(path: Path) -> str | None:
    """The backend whose saved graphs a local folder holds, none of them damaged; None if it holds none.

    None for anything else too, such as a folder that does not exist yet, or a compiler's cache: its graphs are checked,
    and saved graphs in it do not count.

    Raises:
        ArtifactAccessError: the folder cannot be read, or a link in it leads out of it.
        ArtifactError: a graph is empty or was never fetched.
    """
    with reading(path):
        if not path.is_dir():
            return None
        folder = Folder.open(path)
        _check_cache(folder)
        if any(map(_CACHE_FOLDER.fullmatch, folder.folders)):
            return None
        if _count_graphs(folder):
            return "tnx"
        return "nxdi" if saved_by_nxdi(folder.names) else None


def saved_by_nxdi(names: Collection[str]) -> bool:
    """True if a folder with these names holds what NxD Inference's `compile` writes."""
    return {NEURON_CONFIG, _MODEL} <= set(names)


def saved_place(place: str, names: Collection[str]) -> str | None:
    """Return the place of the graphs that NxD Inference has saved in a folder or URI; None if it has none.

    `names`: the files in it, by their paths. A model's folder has vLLM's in a folder of its name and a digest.

    Raises:
        ArtifactError: there are several.
    """
    found = [
        name.removesuffix(_MODEL).rstrip("/")
        for name in names
        if _SAVED_MODEL.fullmatch(name) and name.removesuffix(_MODEL) + NEURON_CONFIG in names
    ]
    if len(found) > 1 and "" not in found:
        msg = (
            f"{place} holds {len(found)} compiled models: {some(sorted(found))}. Name the folder of one in "
            "option.compiled_graph_path"
        )
        raise ArtifactError(msg)
    if not found or "" in found:
        return place if found else None
    return f"{place.rstrip('/')}/{found[0]}"


def saved_names(path: Path) -> set[str]:
    """Return the files that `saved_place` looks for in a local folder."""
    with reading(path):
        return {
            found.relative_to(path).as_posix()
            for name in (NEURON_CONFIG, _MODEL)
            for above in ("", "*/", "*/*/")
            for found in path.glob(above + name)
        }


def with_graphs(artifact: Artifact, path: Path) -> Artifact:
    """The model of `artifact` with the graphs that another program saved with NxD Inference in the folder `path`.

    The model's own weights come first: those beside the graphs may be another training's.

    Raises:
        ArtifactError: see `Nxdi.read`; or the graphs are of another model.
    """
    with reading(path):
        folder = Folder.open(path)
    graphs = _read_graphs(folder, artifact.config, whole_elsewhere=bool(artifact.weights))
    graphs["weights"] = (*artifact.weights, *graphs["weights"])
    graphs["weights_source"] = artifact.weights_source
    return replace(artifact, backend=Nxdi.backend, unused="", **graphs)


def _check_cache(folder: Folder) -> None:
    """Check the graphs of a compiler's cache. A module without one failed or still runs: it is compiled again."""
    for name in folder.folders:
        if _CACHE_FOLDER.fullmatch(name) or name.startswith("MODULE_"):
            inner = folder.sub(name)
            _count_graphs(inner)
            _check_cache(inner)


class Presharded(Format):
    """The output of `model.save(folder, sharded_weights=True)` of transformers-neuronx."""

    name = "tnx_presharded"
    looks_for = "DecoderLMHead.safetensors (presharded by transformers-neuronx)"
    backend = "tnx"

    def matches(self, folder: Folder) -> bool:
        """True if there is a file of sharded weights, or config.json announces them."""
        return has_presharded(folder) or bool(
            folder.json("config.json").get("is_presharded_checkpoint")
        )

    def read(self, folder: Folder) -> Artifact:
        """Sharded weights, and the graphs beside them if there are any."""
        config = read_config(folder)
        weights, degree = _read_presharded(folder, config)
        return self.artifact(
            folder,
            config,
            (weights, *_read_beside(folder, config)),
            compiled=folder.path if _count_graphs(folder) else None,
            compiled_for={_TP: degree, **_read_version(folder, {})},
        )


class CompileOnly(Presharded):
    """The old LMI container's partition with `partition_schema=compile_only`, without a tokenizer."""

    name = "lmi_compile_only"
    looks_for = "DecoderLMHead.safetensors and VERSION (LMI, compile_only)"
    over = frozenset({"huggingface", "tnx_presharded"})

    def matches(self, folder: Folder) -> bool:
        """True if the container's VERSION lies beside sharded weights."""
        return "VERSION" in folder.names and super().matches(folder)

    def read(self, folder: Folder) -> Artifact:
        """Read sharded weights and the graphs beside them, which are required."""
        _require_graphs(folder)
        return super().read(folder)


class LmiAot(Format):
    """The old LMI container's partition: configuration and tokenizer, and everything compiled in `compiled/`."""

    name = "lmi_aot"
    looks_for = "compiled/ (LMI, ahead of time)"
    backend = "tnx"

    def matches(self, folder: Folder) -> bool:
        """True if there is a `compiled/`, or if config.json announces it and there are no whole weights."""
        return "compiled" in folder.names or (
            not has_whole(folder) and "neuron" in folder.json("config.json")
        )

    def read(self, folder: Folder) -> Artifact:
        """The graphs in `compiled/` and the weights there, or else the whole ones of the folder."""
        config, inner = read_config(folder), folder.sub("compiled")
        section = config.get("neuron")
        compiled_for = _compiled_for(section, _SECTION) if isinstance(section, dict) else {}
        compiled_for |= _read_version(inner, compiled_for)
        compiled_for |= _unrecorded(folder, config["model_type"], compiled_for)
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
        return self.artifact(
            folder,
            config,
            (*weights, *_read_beside(folder, config)),
            compiled=_require_graphs(inner),
            compiled_for=compiled_for,
        )


class OptimumTnx(Format):
    """Optimum Neuron on transformers-neuronx (to 0.2): `checkpoint/` holds whole weights, `compiled/` graphs.

    From 0.1 on (neuron_config.json) it had its own copy of that library, whose graphs the original does not find by
    their digest. Of those folders, and of those in `_OPTIMUM` that are compiled in another way than this package
    does, only the weights are used.
    """

    name = "optimum_tnx"
    looks_for = "checkpoint/ and compiled/ (Optimum Neuron, transformers-neuronx)"
    over = frozenset({"huggingface", "lmi_aot"})
    backend = "tnx"

    def matches(self, folder: Folder) -> bool:
        """True if config.json's section "neuron" is Optimum's, or neuron_config.json is of its own library."""
        if _is_hlo(folder.json(NEURON_CONFIG)):
            return True
        section = folder.json("config.json").get("neuron")
        return isinstance(section, dict) and (
            "checkpoint" in folder.names or bool(section.get("checkpoint_id")) or "task" in section
        )

    def read(self, folder: Folder) -> Artifact:
        """Graphs, and weights or the place that they came from."""
        config, compiled = read_config(folder), _require_graphs(folder.sub("compiled"))
        recorded = folder.json(NEURON_CONFIG)
        own = _is_hlo(recorded)
        section = recorded if own else config["neuron"]
        weights, source = _read_checkpoint(folder, config, section)
        compiled_for, reason = (
            ({}, "it did so with its own copy of transformers-neuronx") if own else _optimum(config)
        )
        unused = f"what Optimum Neuron compiled in {folder.path} is not used, but compiled again: {reason}"
        artifact = self.artifact(
            folder,
            config,
            weights,
            compiled=None if reason else compiled,
            compiled_for=compiled_for,
            unused=unused if reason else "",
            weights_source=source,
        )
        # What remains are whole weights, which any backend reads, or split ones.
        return replace(artifact, backend=None) if reason and artifact.kind != "split" else artifact


class NeffCache(Format):
    """A compiler's cache, which is not a model: the error explains its use."""

    name = "neff_cache"
    looks_for = "neuronxcc-*/MODULE_* (a compile cache)"
    over = frozenset()

    def matches(self, folder: Folder) -> bool:
        """True if there are modules by compiler version, or SageMaker JumpStart's, and no model."""
        is_cache = any(map(_CACHE_FOLDER.fullmatch, folder.folders))
        return is_cache and "config.json" not in folder.names

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


class Nxdi(Format):
    """The output of `compile(folder)` of NxD Inference, with or without the checkpoint beside it."""

    name = "nxdi"
    looks_for = "model.pt and neuron_config.json (NxD Inference)"
    over = frozenset({"huggingface", "nxdi_beside"})
    backend = "nxdi"

    def matches(self, folder: Folder) -> bool:
        """True if there is its configuration, or its graphs alone without whole weights."""
        if NEURON_CONFIG in folder.names:
            return not _is_optimum(folder.json(NEURON_CONFIG))
        return _MODEL in folder.names and not has_whole(folder)

    def read(self, folder: Folder) -> Artifact:
        """Graphs, and the saved weights of each rank, else whole ones or the place that they came from.

        Raises:
            ArtifactError: see `Format.read`; or config.json is another model's.
        """
        whole = folder.json(folder.file(NEURON_CONFIG).name)
        if "config.json" in folder.names:
            config = read_config(folder)
        else:
            rest = {key: value for key, value in whole.items() if key != "neuron_config"}
            config = require_model_type(rest, folder, NEURON_CONFIG)
        graphs = _read_graphs(folder, config, whole_elsewhere=has_whole(folder))
        return self.artifact(folder, config, **_with_whole(folder, config, graphs))


class NxdiBeside(Format):
    """A model with NxD Inference's graphs in a sub-folder: vLLM's, or an output of this package with cut weights."""

    name = "nxdi_beside"
    looks_for = "neuron-compiled-artifacts/ (vLLM, NxD Inference)"
    over = frozenset({"huggingface", "lmi_aot"})

    def matches(self, folder: Folder) -> bool:
        """True if a sub-folder has both files that the library writes; what a killed compile left does not count."""
        return bool(_beside(folder))

    def read(self, folder: Folder) -> Artifact:
        """The model, with the graphs if they are of one compile."""
        config, found = read_config(folder), _beside(folder)
        if len(found) > 1:
            unused = (
                f"{folder.path} holds {len(found)} compiled models: {some(found)}. None is used: name the "
                "folder of one in option.compiled_graph_path"
            )
            return self.artifact(folder, config, _read_beside(folder, config), unused=unused)
        inner = folder
        for name in found[0].split("/"):
            inner = inner.sub(name)
        graphs = _read_graphs(inner, config, whole_elsewhere=has_whole(folder))
        artifact = self.artifact(folder, config, **_with_whole(folder, config, graphs))
        return replace(artifact, backend=Nxdi.backend)


class OptimumNxd(Format):
    """Optimum Neuron from 0.3 on: its own modelling code on NxD, whose graphs take and hold other tensors.

    Source: Optimum Neuron 0.3.0 and 0.4.0, models/inference/backend: five inputs, modules of its own.
    """

    name = "optimum_nxd"
    looks_for = "model.pt and Optimum's neuron_config.json"

    def matches(self, folder: Folder) -> bool:
        """True if neuron_config.json is Optimum's for NxD."""
        recorded = folder.json(NEURON_CONFIG)
        return _is_optimum(recorded) and not _is_hlo(recorded)

    def read(self, folder: Folder) -> Artifact:
        """Whole weights, or the place that they came from."""
        config, recorded = read_config(folder), folder.json(NEURON_CONFIG)
        unused = (
            f"what Optimum Neuron {shortened(recorded.get('optimum_neuron_version'))} compiled in {folder.path} is not "
            "used: its graphs come from its own modelling code, which NxD Inference does not load"
        )
        if _is_cut(folder):
            unused += ", nor the weights in checkpoint/weights, which are cut for it"
        weights, source = _read_checkpoint(folder, config, recorded)
        return self.artifact(folder, config, weights, unused=unused, weights_source=source)


def _unrecorded(folder: Folder, kind: str, recorded: Mapping[str, object]) -> dict[str, object]:
    """The lengths that the old LMI container compiled for, where it batched continuously; else {}.

    They follow from what it recorded and from its serving.properties, which has the options of the compile. Source: LMI
    before djl-serving 1132e3ab, model_loader.py, get_model_specific_kwargs; utils.py, build_context_length_estimates.
    """
    written: dict[str, object] = {}
    with suppress(ConfigError):  # which is reported where the settings are read
        written = {setting.name: setting.value for setting in from_file(folder.path)}
    longest = recorded.get("n_positions")
    joins = kind in _CONTINUOUS and recorded.get("max_rolling_batch_size") != 1
    if written.get("rolling_batch") == "disable" or type(longest) is not int or longest < 2:
        return {}
    if written.get("rolling_batch_strategy", _JOINS if joins else "") != _JOINS:
        return {}
    lengths: dict[str, object] = {"n_positions": (longest,)}
    if "context_length_estimate" not in written:
        prompts = (longest,) if written.get("cache_layout") == "BSH" else make_buckets(longest)
        kept = tuple(length for length in prompts if length in {128, longest} or length >= 1024)
        lengths["context_length_estimate"] = kept
    return lengths


def _is_hlo(recorded: Mapping[str, Any]) -> bool:
    return recorded.get("_serialized_key") == "HloNeuronConfig"


def _optimum(config: Mapping[str, Any]) -> tuple[dict[str, object], str]:
    """The options that Optimum Neuron to 0.0.28 compiled for, and why its graphs are not used; empty if they are.

    Where it gives the library a single length, that doubles from 128 on for tokens and from 64 on for prompts.
    """
    section, kind = config["neuron"], config["model_type"]
    version = str(config.get("transformers_version"))
    found = re.match(r"(\d{1,3})\.(\d{1,3})", version)
    made_by = tuple(map(int, found.groups())) if found else ()
    row = next((row for least, row in _OPTIMUM.items() if made_by >= least), None)
    if row is None:
        return {}, (
            f"transformers_version is {shortened(version)!r} in config.json, expected 4.41 or later: releases before "
            "0.0.23 do not record whether they compile for continuous batching, nor the attention layout"
        )
    releases, fused, others = row
    if reason := {**others, "gpt2": _NO_PREFILL}.get(kind):
        return {}, f"{reason} (release {releases}, by transformers {shortened(version)})"
    compiled_for = _compiled_for(section, _SECTION)
    compiled_for |= {"attention_layout": "BSH" if kind == "llama" else "HSB", "fuse_qkv": fused}
    longest = section.get("sequence_length")
    if type(longest) is int and longest > 1:
        joins = kind in _CONTINUOUS and section.get("batch_size") != 1
        lengths = (longest,) if joins else make_buckets(longest)
        compiled_for |= {
            "n_positions": lengths,
            "context_length_estimate": lengths if joins else tuple(n // 2 for n in lengths),
            "rolling_batch_strategy": _JOINS if joins else "naive_rolling_batch",
        }
    return compiled_for, ""


def _is_optimum(recorded: Mapping[str, Any]) -> bool:
    return "_serialized_key" in recorded or "optimum_neuron_version" in recorded


def _count_graphs(folder: Folder) -> int:
    """Number of graphs of transformers-neuronx in a folder; none of them is empty.

    Source: transformers-neuronx, base.py, _save_compiled_artifacts: `<digest of the HLO>.neff`.

    Raises:
        ArtifactError: one of them cannot be read, is empty or was never fetched.
    """
    return len([folder.file(name) for name in sorted(folder.names) if name.endswith(".neff")])


def _require_graphs(folder: Folder) -> Path:
    """The path of a folder that must hold graphs.

    Raises:
        ArtifactNotFoundError: there are none.
        ArtifactError: see `_count_graphs`.
    """
    if not _count_graphs(folder):
        msg = (
            f"no compiled graphs in {folder.path}: expected *.neff, found {some(sorted(folder.names))}. "
            "The compilation was cut short, or the files were left behind: compile or copy it again."
        )
        raise ArtifactNotFoundError(msg)
    return folder.path


def _compiled_for(recorded: Mapping[str, object], keys: Mapping[str, str]) -> dict[str, object]:
    """Option name -> value that a library recorded; `keys` maps its names to ours. Nulls count as unrecorded."""
    found: dict[str, object] = {}
    for key, option in keys.items():
        value = recorded.get(key)
        if option == "dtype" and isinstance(value, str):
            value = long_dtype(value)
        if value is not None:
            found[option] = tuple(value) if isinstance(value, list) else value
    return found


def _read_checkpoint(
    folder: Folder, config: Mapping[str, Any], recorded: Mapping[str, Any]
) -> tuple[tuple[Weights, ...], str | None]:
    """Whole weights of an Optimum folder, or else the Hub id that it took them from.

    Raises:
        ArtifactNotFoundError: it has neither.
        ArtifactError: the weights are damaged.
    """
    if "checkpoint" in folder.names and not _is_cut(folder):
        return (read_whole(folder.sub("checkpoint"), config),), None
    if weights := _read_beside(folder, config):
        return weights, None
    source, revision = recorded.get("checkpoint_id"), recorded.get("checkpoint_revision")
    if not isinstance(source, str):
        msg = (
            f"{folder.path} has no weights: expected checkpoint/, or a checkpoint_id that names their source; found "
            f"{some(sorted(folder.names))}. Copy the whole folder again."
        )
        raise ArtifactNotFoundError(msg)
    return (), f"{source}@{revision}" if revision else source


def _is_cut(folder: Folder) -> bool:
    """True if the weights in `checkpoint` are cut for NxD, with a file for each rank."""
    return "checkpoint" in folder.folders and "weights" in folder.sub("checkpoint").names


def _read_beside(folder: Folder, config: Mapping[str, Any]) -> tuple[Weights, ...]:
    """The whole weights in a folder, if there are any."""
    return (read_whole(folder, config),) if has_whole(folder) else ()


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


def _beside(folder: Folder) -> list[str]:
    """The sub-folders with what NxD Inference has compiled, by their paths in a folder.

    Source: vllm-neuron 0.2, neuronx_distributed_model_loader.py: a folder named after the configuration's digest. The
    old LMI container had the library write into `neuron-compiled-artifacts` itself.
    """
    candidates = [folder.path / name for name in sorted(_GRAPH_FOLDERS & folder.folders)]
    with reading(folder.path):
        candidates += sorted((folder.path / _VLLM).glob("*/"))
        return [
            path.relative_to(folder.path).as_posix()
            for path in candidates
            if all((path / name).is_file() for name in (NEURON_CONFIG, _MODEL))
        ]


def _read_graphs(
    folder: Folder, config: Mapping[str, Any], *, whole_elsewhere: bool
) -> dict[str, Any]:
    """The fields of `Artifact` about what NxD Inference has compiled into a folder for a model with this config.json.

    Weights that it has cut must be there if it recorded so, unless there are whole ones.

    Raises:
        ArtifactNotFoundError: the graphs or a rank's weights are missing.
        ArtifactError: a file is damaged, or the graphs are of another model or have a draft model in them.
    """
    path = folder.path / NEURON_CONFIG
    whole = folder.json(folder.file(NEURON_CONFIG).name)
    recorded = whole.get("neuron_config")
    if not isinstance(recorded, dict):
        msg = (
            f"{path} has no section neuron_config; expected the one that NxD Inference "
            "writes. Compile the model again."
        )
        raise ArtifactError(msg)
    if _MODEL not in folder.names:
        msg = (
            f"{folder.path / _MODEL} is missing although {NEURON_CONFIG} is there: the compilation was cut short. "
            f"Compile again, or remove {NEURON_CONFIG} to serve the checkpoint."
        )
        raise ArtifactNotFoundError(msg)
    check_archive(folder, _MODEL)
    if different := other_fields(whole, config):
        msg = (
            f"{path} is of another model than config.json: it has {', '.join(different)}. "
            "Compile this model, or serve the one that was compiled."
        )
        raise ArtifactError(msg)
    if whole.get("fused_spec_config") and MANIFEST not in folder.names:
        msg = (
            f"{path} has a fused draft model (fused_spec_config), and does not name its content. Compile the model "
            "again, with option.speculative_draft_model."
        )
        raise ArtifactError(msg)
    try:
        compiled_for = as_options(recorded)
    except (TypeError, ValueError) as error:
        msg = f"{path} has a neuron_config that the library cannot have written: {error}. Compile the model again."
        raise ArtifactError(msg) from error
    source = whole.get("_name_or_path")
    lost = recorded.get("save_sharded_checkpoint") and not whole_elsewhere
    if lost and "weights" not in folder.names:
        msg = (
            f"{folder.path / 'weights'} is missing; {path} records weights in it (save_sharded_checkpoint). Copy it "
            "too, or name the checkpoint in option.model_id and this folder in option.compiled_graph_path."
        )
        raise ArtifactNotFoundError(msg)
    return {
        "weights": (_read_ranks(folder, recorded),) if "weights" in folder.names else (),
        "weights_source": str(shortened(source)) if source else None,
        "compiled": folder.path,
        "compiled_for": compiled_for,
        "neuron_config": recorded,
    }


def _with_whole(
    folder: Folder, config: Mapping[str, Any], graphs: Mapping[str, Any]
) -> dict[str, Any]:
    """The result of `_read_graphs`, with the whole weights of the model's folder.

    Raises:
        ArtifactNotFoundError: there are no weights, and their source is not recorded.
    """
    weights = (*graphs["weights"], *_read_beside(folder, config))
    if not weights and graphs["weights_source"] is None:
        msg = (
            f"{folder.path} has no weights: expected weights/, or the checkpoint beside {_MODEL}; found "
            f"{some(sorted(folder.names))}. Put the model's safetensors files into it."
        )
        raise ArtifactNotFoundError(msg)
    source = None if weights else graphs["weights_source"]
    return {**graphs, "weights": weights, "weights_source": source}


def _read_ranks(folder: Folder, recorded: Mapping[str, Any]) -> Weights:
    """The weights of the ranks that this host runs; by default of all."""
    first = recorded.get("start_rank_id") or 0
    count = recorded.get("local_ranks_size") or recorded.get("tp_degree")
    if type(first) is not int or type(count) is not int or not 0 < count <= _MAX_RANKS:
        msg = (
            f"{folder.path}: {NEURON_CONFIG} gives start_rank_id {first!r} and local_ranks_size or tp_degree "
            f"{count!r}; expected numbers of ranks. Compile the model again."
        )
        raise ArtifactError(msg)
    return read_ranks(folder.sub("weights"), range(first, first + count))


def _read_version(folder: Folder, recorded: Mapping[str, object]) -> dict[str, object]:
    """The compiler's version in the container's VERSION file, which must agree with the recorded one."""
    if "VERSION" not in folder.names:
        return {}
    path = folder.file("VERSION")
    with reading(path):
        version = path.read_text(encoding="utf-8", errors="replace").strip()
    other = recorded.get("compiler_version", version)
    if other != version:
        msg = f"{path} names compiler {version!r}, config.json {other!r}; two outputs were mixed. {AGAIN}"
        raise ArtifactError(msg)
    return {"compiler_version": version}
