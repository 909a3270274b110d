"""The outputs of NxD Inference as the engine takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from djl_python_neuronx.backends.base import (
    Float32Array,
    ModelSpec,
    Rows,
    StepOutput,
    Want,
)


def answer(output: Any, rows: Rows, spec: ModelSpec) -> StepOutput:  # noqa: ANN401
    """Return arrays that the caller owns. `output`: the library's, with a row for each of `rows` or for each slot."""

    def of_rows(values: Any) -> Any:  # noqa: ANN401
        found = values.numpy()
        return found if len(found) == len(rows.slots) else found[rows.slots]

    columns, vocab_size = int(rows.wants != Want.NOTHING), spec.vocab_size
    if rows.wants == Want.ALL_LOGITS:
        columns = rows.input_ids.shape[1]
    logits: Float32Array | None = None
    on_host = Want.TOKENS not in spec.outputs
    if on_host or Want.LOGITS in rows.wants:
        found = of_rows(output.logits)[:, :columns, :vocab_size]
        logits = np.ascontiguousarray(found, np.float32)
        if on_host:
            return StepOutput(logits)
    ids = of_rows(output.tokens).reshape(len(rows.slots), -1)
    ids = ids if columns else ids[:, :0]
    if Want.LOGITS in spec.outputs:
        # One column is enough: the output layer spreads NaN over the whole vocabulary.
        ids = np.where(np.isfinite(of_rows(output.logits[:, 0, :1])), ids, -1)
    # The vocabulary is padded to a multiple of the cores; only NaN yields a token of the padding.
    return StepOutput(logits, np.where(ids < vocab_size, ids, -1).astype(np.int32))
