"""Sampling on the device: the parameters that each slot has there, and sending new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from djl_python_neuronx.backends.base import Float32Array, Rows
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import check_top_k
from djl_python_neuronx.backends.tnx.model import import_library

_GREEDY = (1.0, 1.0, 1.0)
_UNBOUNDED_TOP_K = 256
TEMPERATURES = 0.01, None
"""The library divides logits by the temperature, then drops tokens by a logit of -30000: of a model whose best logit is
-70 they would be drawn from a temperature of 0.0023 down (hlo.py, `topk_masked`). In float16 the quotients overflow."""


class DeviceSampling:
    """The generation config of a model, as the device has it.

    Sending writes four tensors to every core, so it happens only when a row's parameters have changed.
    """

    def __init__(self, model: Any, generation: Mapping[str, Any], num_slots: int) -> None:  # noqa: ANN401
        """`generation`: the keywords of the library's `GenerationConfig` that the model was built with."""
        self._model = model
        self._fixed = dict(generation)
        self._dynamic = bool(generation.get("dynamic"))
        self._sent: Float32Array = np.zeros((num_slots, 3), np.float32)

    @classmethod
    def of(cls, model: Any, plan: LoadPlan) -> DeviceSampling | None:  # noqa: ANN401
        """Return the device sampling of a model; None if the host samples."""
        generation = plan.arguments.neuron_config.get("on_device_generation")
        return None if generation is None else cls(model, generation, plan.num_slots)

    @property
    def largest_top_k(self) -> int | None:
        """The largest top_k of a row; None if all rows share compiled-in parameters."""
        if not self._dynamic:
            return None
        vocab_size = int(self._model.config.vocab_size)
        return min(int(self._fixed.get("global_top_k") or _UNBOUNDED_TOP_K), vocab_size)

    @property
    def fixed(self) -> tuple[float, float, float] | None:
        """top_k, top_p and temperature of every row; None if each row has its own."""
        if self._dynamic:
            return None
        get = self._fixed.get
        if not get("do_sample") or get("top_k", 50) == 1:
            return _GREEDY
        return float(get("top_k", 50)), float(get("top_p", 1.0)), float(get("temperature", 1.0))

    def send(self, rows: Rows) -> None:
        """Send the parameters of these rows to the device if they have changed.

        Raises:
            StepError: a top_k that the device cannot sample with.
        """
        if not self._dynamic or np.array_equal(self._sent[rows.slots], rows.sampling):
            return
        check_top_k(rows, self.largest_top_k or 0)
        wanted = self._sent.copy()
        wanted[(wanted[:, 0] < 1)] = _GREEDY
        wanted[rows.slots] = rows.sampling
        keywords = {
            **self._fixed,
            "top_k": wanted[:, 0].astype(int).tolist(),
            "top_p": wanted[:, 1].tolist(),
            "temperature": wanted[:, 2].tolist(),
        }
        # A new object each time: the library changes its argument.
        self._model.update_generation_config(import_library().GenerationConfig(**keywords))
        self._sent = wanted
