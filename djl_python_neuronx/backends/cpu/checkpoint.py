"""Load a Hugging Face model from its folder; a checkpoint that lacks weights is refused."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from djl_python_neuronx.artifacts.folder import read_json
from djl_python_neuronx.artifacts.tensor_files import damage
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.rotary import rotary_fields
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
    DeviceMemoryError,
)

logger = logging.getLogger(__name__)

_TRANSFORMERS = (4, 57)
"""Before, gpt2, opt and gpt_bigcode had no Cache."""
_NAMED = 5
"""Tensors named in a message; the rest is counted."""
_UNSEEN = {
    "attn_logit_softcapping": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}
"""Fields that transformers leaves out where torch computes attention, to the value at which that changes nothing."""
_AUTO_CONFIG: Any = transformers.AutoConfig
_AUTO_MODEL: Any = transformers.AutoModelForCausalLM
_KNOWN_TYPES: Any = transformers.CONFIG_MAPPING
_LOGGING: Any = transformers_logging


def check_version() -> None:
    """Refuse a transformers that is too old.

    Raises:
        BackendUnavailableError: it is older than 4.57.
    """
    if _version() < _TRANSFORMERS:
        message = (
            f"transformers {transformers.__version__} is too old for the cpu backend; expected 4.57 or newer. "
            "Install it: pip install 'djl-python-neuronx[cpu]'"
        )
        raise BackendUnavailableError(message)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def load_checkpoint(plan: LoadPlan) -> Any:  # noqa: ANN401
    """Return the model in evaluation mode, with every tensor from the files of `model_dir`.

    In the dtype of the files, the weights are the files' mapped pages: they take no memory of their own, and the files
    must not change while the model is in use. In another dtype they are copies.

    Raises:
        ArtifactError: a file or tensor is missing, damaged or of the wrong shape.
        BackendError: transformers does not know the architecture.
        BackendUnavailableError: a package that the model needs is missing.
        DeviceMemoryError: the weights do not fit.
    """
    if not (plan.model_dir / "config.json").is_file():
        message = f"{plan.model_dir} has no config.json; expected a Hugging Face model folder"
        raise ArtifactNotFoundError(message)
    code = {"trust_remote_code": plan.trust_remote_code, "code_revision": plan.revision}
    dtype = "dtype" if _version() >= (4, 56) else "torch_dtype"
    try:
        with _silent_transformers():
            config = _AUTO_CONFIG.from_pretrained(str(plan.model_dir), **code)
            text = config.get_text_config()
            if _version() < (5, 0):  # which ignores rope_parameters
                vars(text).update(rotary_fields(text))
            eager = any(getattr(text, name, usual) != usual for name, usual in _UNSEEN.items())
            model, loaded = _AUTO_MODEL.from_pretrained(
                str(plan.model_dir),
                config=config,
                **{dtype: getattr(torch, plan.dtype)},
                attn_implementation="eager" if eager else None,
                use_safetensors=plan.kind == "safetensors",
                ignore_mismatched_sizes=True,  # listed below
                output_loading_info=True,
                **code,
            )
    except Exception as error:
        raise _translate(error, plan) from error
    # transformers 4.57 gives names, 5 gives them with both shapes.
    other = sorted(key if isinstance(key, str) else key[0] for key in loaded["mismatched_keys"])
    if other:
        message = (
            f"the weights in {plan.model_dir} cannot be loaded: {len(other)} tensors have another "
            f"shape than config.json says: {_some(other)}. Correct config.json or fetch the model again"
        )
        raise ArtifactError(message)
    missing = sorted(loaded["missing_keys"])
    if missing:
        message = (
            f"the weights in {plan.model_dir} lack {len(missing)} tensors of "
            f"{type(model).__name__}: {_some(missing)}. Fetch the model again"
        )
        raise ArtifactError(message)
    unexpected = sorted(loaded["unexpected_keys"])
    if unexpected:
        logger.warning("unused_weights count=%d tensors=%s", len(unexpected), _some(unexpected))
    return model.eval()


def _translate(error: Exception, plan: LoadPlan) -> ArtifactError | BackendError:
    where, version = plan.model_dir, f"transformers {transformers.__version__}"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return DeviceMemoryError(f"{where} does not fit into memory; use bf16 or a larger machine")
    if "trust_remote_code" in str(error):
        return ArtifactError(
            f"the model in {where} brings its own code, which is not run by default. "
            "If you trust it, set option.trust_remote_code=true"
        )
    if isinstance(error, ImportError):
        return BackendUnavailableError(
            f"the model in {where} needs a package that is missing: {error}. "
            "Install it, or use a checkpoint that is not quantised"
        )
    config = read_json(where / "config.json")
    if config.get("model_type") not in _KNOWN_TYPES and "auto_map" not in config:
        return BackendError(
            f"{version} does not know model_type {config.get('model_type')!r} of {where}; expected "
            "an architecture that it has. Install a newer transformers, or use another model"
        )
    if str(error).startswith("Unrecognized configuration class"):
        return BackendError(
            f"{version} has no causal language model of model_type {config.get('model_type')!r} "
            f"({where}); expected one that continues text. Use another model"
        )
    damaged = [path.name for path in sorted(where.glob("*.safetensors")) if damage(path)]
    if damaged and isinstance(error, SafetensorError):
        return ArtifactError(
            f"the model in {where} cannot be loaded: {', '.join(damaged)} cannot be read. "
            "Expected complete weight files; fetch the model again"
        )
    return ArtifactError(
        f"the model in {where} cannot be loaded: {type(error).__name__}: {error}. Expected a "
        f"config.json that {version} understands and complete weights that fit it; correct "
        "config.json or fetch the model again"
    )


def _some(tensors: list[str]) -> str:
    return ", ".join(tensors[:_NAMED]) + (", …" if len(tensors) > _NAMED else "")


@contextlib.contextmanager
def _silent_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and reports; the caller checks what matters of them."""
    verbosity = _LOGGING.get_verbosity()
    bars = _LOGGING.is_progress_bar_enabled()
    _LOGGING.set_verbosity(logging.CRITICAL)
    _LOGGING.disable_progress_bar()
    try:
        yield
    finally:
        _LOGGING.set_verbosity(verbosity)
        if bars:
            _LOGGING.enable_progress_bar()
