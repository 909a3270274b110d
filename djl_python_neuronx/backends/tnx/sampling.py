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

    def __init__(self, generation: Mapping[str, Any], num_slots: int, vocab_size: int) -> None:
        """`generation`: the keywords of the library's `GenerationConfig` that the model was built with."""
        get = generation.get
        self._keywords = generation
        self._sent: Float32Array = np.zeros((num_slots, 3), np.float32)
        self.largest_top_k: int | None = None
        """The largest top_k of a row; None if all rows share compiled-in parameters."""
        self.fixed: tuple[float, float, float] | None = None
        """top_k, top_p and temperature of every row; None if each row has its own."""
        if get("dynamic"):
            self.largest_top_k = min(int(get("global_top_k") or _UNBOUNDED_TOP_K), vocab_size)
        elif not get("do_sample") or get("top_k", 50) == 1:
            self.fixed = _GREEDY
        else:
            self.fixed = (
                float(get("top_k", 50)),
                float(get("top_p", 1.0)),
                float(get("temperature", 1.0)),
            )

    @classmethod
    def of(cls, model: Any, plan: LoadPlan) -> DeviceSampling | None:  # noqa: ANN401
        """Return the device sampling of a model; None if the host samples."""
        generation = plan.arguments.neuron_config.get("on_device_generation")
        if generation is None:
            return None
        return cls(generation, plan.num_slots, int(model.config.vocab_size))

    def send(self, rows: Rows, model: Any) -> None:  # noqa: ANN401
        """Send the parameters of these rows to the device if they have changed.

        Raises:
            StepError: a top_k that the device cannot sample with.
        """
        if self.largest_top_k is None or np.array_equal(self._sent[rows.slots], rows.sampling):
            return
        check_top_k(rows, self.largest_top_k)
        wanted = self._sent.copy()
        wanted[(wanted[:, 0] < 1)] = _GREEDY
        wanted[rows.slots] = rows.sampling
        keywords = {
            **self._keywords,
            "top_k": wanted[:, 0].astype(int).tolist(),
            "top_p": wanted[:, 1].tolist(),
            "temperature": wanted[:, 2].tolist(),
        }
        # A new object each time: the library changes its argument.
        model.update_generation_config(import_library().GenerationConfig(**keywords))
        self._sent = wanted
