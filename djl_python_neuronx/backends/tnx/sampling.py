"""Sampling on the device: which parameters a slot has there, and when they have to be sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from djl_python_neuronx.backends.base import Float32Array, Rows
from djl_python_neuronx.backends.shapes import refuse
from djl_python_neuronx.backends.tnx.model import import_library

_GREEDY = (1.0, 1.0, 1.0)
_UNBOUNDED_TOP_K = 256


class DeviceSampling:
    """The generation config of a model, kept as the device has it.

    Sending writes four tensors to every core, so it happens only when a row's parameters differ from what is there.
    """

    def __init__(self, model: Any, generation: Mapping[str, Any], num_slots: int) -> None:  # noqa: ANN401
        """`generation`: what the model was made with, as keywords of the library's `GenerationConfig`."""
        self._model = model
        self._fixed = dict(generation)
        self._dynamic = bool(generation.get("dynamic"))
        self._sent: Float32Array = np.zeros((num_slots, 3), np.float32)
        self.num_sent = 0
        """Times that the device was given new parameters."""

    @property
    def largest_top_k(self) -> int | None:
        """Most tokens that a row may choose among; None: rows have no parameters of their own."""
        if not self._dynamic:
            return None
        vocab_size = int(self._model.config.vocab_size)
        return min(int(self._fixed.get("global_top_k") or _UNBOUNDED_TOP_K), vocab_size)

    @property
    def fixed(self) -> tuple[float, float, float] | None:
        """top_k, top_p and temperature of every row; None: rows have their own."""
        if self._dynamic:
            return None
        get = self._fixed.get
        if not get("do_sample") or get("top_k", 50) == 1:
            return _GREEDY
        return float(get("top_k", 50)), float(get("top_p", 1.0)), float(get("temperature", 1.0))

    def send(self, rows: Rows) -> None:
        """Give the device the parameters of these rows, if it has others.

        Raises:
            StepError: a top_k that it cannot sample with.
        """
        if not self._dynamic or np.array_equal(self._sent[rows.slots], rows.sampling):
            return
        top_k, most = rows.sampling[:, 0], self.largest_top_k or 0
        if top_k.min() < 1 or top_k.max() > most:
            refuse(f"top_k {top_k.astype(int).tolist()}", f"1 to {most} on the device")
        wanted = self._sent.copy()
        wanted[(wanted[:, 0] < 1)] = _GREEDY
        wanted[rows.slots] = rows.sampling
        # A new object each time: the library changes the one that it is given.
        config = import_library().GenerationConfig(
            **{
                **self._fixed,
                "top_k": wanted[:, 0].astype(int).tolist(),
                "top_p": wanted[:, 1].tolist(),
                "temperature": wanted[:, 2].tolist(),
            }
        )
        self._model.update_generation_config(config)
        self._sent = wanted
        self.num_sent += 1
