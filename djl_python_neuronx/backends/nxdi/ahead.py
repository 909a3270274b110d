"""The step that NxD Inference runs ahead of the host."""

from __future__ import annotations

from typing import Any

import torch

from djl_python_neuronx.backends.base import Float32Array, Int32Array


class StepAhead:
    """The decode that the library has started before its turn (`async_mode`; source: modules/async_execution.py, 0.9).

    A decode starts the next one before it waits for its own tokens: from those, on the device, each position one
    higher, with the same parameters. The next call with the same `seq_ids` returns that step's tokens and
    ignores its own inputs. A prefill drops the step; near the end of a bucket or of the cache the library starts none.

    Here it is dropped unless its inputs are those of the call. A dropped step's writes are harmless: the device
    runs steps in order, and its rows write there next, or are free.
    """

    def __init__(self, application: Any) -> None:  # noqa: ANN401
        """None has been started. `application`: loaded."""
        self._application = application
        self._inputs: tuple[Int32Array | Float32Array, ...] = ()

    def drop(self, *, alone: bool = False) -> None:
        """Drop the step. `alone`: the next decode starts none."""
        self._application.prior_outputs = None
        # The library takes None for the call's `seq_ids`; with others the call is synchronous.
        self._application.prior_seq_ids = torch.empty(0) if alone else None

    def settle(self, slots: Int32Array, *inputs: Int32Array | Float32Array) -> None:
        """Before a decode: drop the step unless it has the same tokens, positions and parameters in `slots`.

        `inputs` have a row for each slot.
        """
        pairs = zip(self._inputs, inputs, strict=False)
        same = [(started[slots] == wanted[slots]).all() for started, wanted in pairs]
        if not (same and all(same)):
            self.drop()

    def note(self, tokens: Int32Array, positions: Int32Array, sampling: Float32Array) -> None:
        """After a decode: it gave `tokens`, int32[B, 1], at `positions` with the parameters `sampling`."""
        self._inputs = (tokens, positions + 1, sampling)
