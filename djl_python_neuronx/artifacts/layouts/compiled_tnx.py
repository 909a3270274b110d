"""Model folders that transformers-neuronx, the old LMI container or Optimum Neuron on top of it have compiled."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts.layouts.artifact import Artifact, read_config, read_eos_ids
from djl_python_neuronx.artifacts.layouts.folder import AGAIN, Folder, some, unreadable
from djl_python_neuronx.artifacts.layouts.graphs import (
    check_neffs,
    compiled_options,
    is_cache,
    require_neffs,
)
from djl_python_neuronx.artifacts.layouts.weights import (
    Weights,
    has_presharded,
    has_whole,
    read_presharded,
    read_whole,
)
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError, UnknownFormatError

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
