"""The reference: transformers on the CPU, with the same checkpoint, without a cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from djl_python_neuronx.backends.base import Float32Array
from djl_python_neuronx.backends.cpu.checkpoint import load_checkpoint
from djl_python_neuronx.backends.plan import LoadPlan

logger = logging.getLogger(__name__)

Float64Array = npt.NDArray[np.float64]
_MADE: Any = transformers


class Reference:
    """A checkpoint in one dtype."""

    def __init__(self, plan: LoadPlan, dtype: Any) -> None:  # noqa: ANN401  (the literals of the plan)
        """Load it.

        Raises:
            ServingError: see `load_checkpoint`.
        """
        logger.info("loading the reference dtype=%s", dtype)
        self._model = load_checkpoint(replace(plan, dtype=dtype))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens with which transformers ends a text."""
        named = getattr(self._model.generation_config, "eos_token_id", None)
        return frozenset([] if named is None else named if isinstance(named, list) else [named])

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], positions: Sequence[int]) -> Float32Array:
        """Return float32[P, V]: the logits behind these positions of a text."""
        index, forward = torch.tensor(positions), self._model.forward
        keep = "logits_to_keep" in inspect.signature(forward).parameters
        more = {"logits_to_keep": index} if keep else {}
        found = self._model(
            input_ids=torch.tensor([[*ids[: max(positions) + 1]]]), use_cache=False, **more
        ).logits[0]
        values: Float32Array = (found if keep else found[index]).float().numpy()
        return values


def distribution(logits: Float32Array, settings: Mapping[str, Any]) -> Float64Array:
    """float64[V]: the probabilities from which transformers' `generate` draws, in its order of rules.

    A tie at the edge of a nucleus is kept whole, as by the engine's sampler; transformers cuts it anywhere.
    """
    scores = given = torch.from_numpy(logits.copy()).double()[None]
    warpers = [_MADE.TemperatureLogitsWarper(float(settings["temperature"]))]
    if settings.get("top_k"):
        warpers.append(_MADE.TopKLogitsWarper(int(settings["top_k"])))
    if settings.get("top_p", 1.0) < 1:
        warpers.append(_MADE.TopPLogitsWarper(float(settings["top_p"])))
    for warper in warpers:
        scores = warper(None, scores)
    least = given.where(scores > -torch.inf, torch.inf).min()
    kept = given.where(given >= least, -torch.inf) / float(settings["temperature"])
    found: Float64Array = torch.softmax(kept[0], 0).numpy()
    return found


def chi_square(statistic: float, freedom: int) -> float:
    """Return the chance of a value at least as large."""
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))
