"""A Hugging Face model from its folder, complete or not at all."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BackendUnavailableError,
    DeviceMemoryError,
)

logger = logging.getLogger(__name__)

_TRANSFORMERS = (4, 57)
"""Before, gpt2, opt and gpt_bigcode had no Cache."""
_NAMED = 5
"""Tensors named in a message; the rest is counted."""
_AUTO_MODEL: Any = transformers.AutoModelForCausalLM
_LOGGING: Any = transformers_logging


def check_version() -> None:
    """Refuse a transformers that is too old.

    Raises:
        BackendUnavailableError: which version there is and which is needed.
    """
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _TRANSFORMERS:
        message = (
            f"transformers {version} is too old for the cpu backend; expected 4.57 or newer. "
            "Install it: pip install 'djl-python-neuronx[cpu]'"
        )
        raise BackendUnavailableError(message)


def load_checkpoint(plan: LoadPlan) -> Any:  # noqa: ANN401
    """The model in evaluation mode, every tensor of it from the files of `model_dir`.

    Raises:
        ArtifactError: a file or tensor is missing, damaged or of the wrong shape.
        DeviceMemoryError: the weights do not fit.
    """
    if not (plan.model_dir / "config.json").is_file():
        message = f"{plan.model_dir} has no config.json; expected a Hugging Face model folder"
        raise ArtifactNotFoundError(message)
    has_safetensors = any(plan.model_dir.glob("*.safetensors"))
    try:
        with _silent_transformers():
            model, loaded = _AUTO_MODEL.from_pretrained(
                str(plan.model_dir),
                dtype=getattr(torch, plan.dtype),
                trust_remote_code=plan.trust_remote_code,
                code_revision=plan.revision,
                use_safetensors=has_safetensors,
                output_loading_info=True,
            )
    except Exception as error:
        raise _translate(error, plan) from error
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


def _translate(error: Exception, plan: LoadPlan) -> ArtifactError | DeviceMemoryError:
    where = plan.model_dir
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return DeviceMemoryError(f"{where} does not fit into memory; use bf16 or a larger machine")
    if "trust_remote_code" in str(error):
        return ArtifactError(
            f"the model in {where} brings its own code, which is not run unless you say so. "
            "If you trust it, set option.trust_remote_code=true"
        )
    damaged = [path.name for path in sorted(where.glob("*.safetensors")) if _is_damaged(path)]
    cause = f"{', '.join(damaged)} cannot be read" if damaged else f"{error}"
    return ArtifactError(
        f"the model in {where} cannot be loaded: {cause}. "
        "Expected complete weight files that fit config.json; fetch the model again"
    )


def _some(tensors: list[str]) -> str:
    return ", ".join(tensors[:_NAMED]) + (", …" if len(tensors) > _NAMED else "")


def _is_damaged(path: Path) -> bool:
    """True if the header does not fit the file's size."""
    try:
        with safe_open(str(path), "pt"):
            return False
    except (OSError, SafetensorError):
        return True


@contextlib.contextmanager
def _silent_transformers() -> Iterator[None]:
    """Loading without transformers' bars and reports: what matters of them is checked here."""
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
