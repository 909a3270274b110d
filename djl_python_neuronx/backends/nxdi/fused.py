"""A draft model in the same graphs as the model that it drafts for: fused speculation, EAGLE and EAGLE3.

Source: neuronx-distributed-inference 0.4 to 0.9, models/model_base.py `NeuronFusedSpecModel`, models/config.py
`FusedSpecNeuronConfig` and models/application_base.py `checkpoint_loader_fn`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from djl_python_neuronx.backends.base import Int32Array
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import ArtifactError

_SHARED = ("lm_head.weight", "embed_tokens.weight")
"""Weights that an EAGLE draft takes from the model where its checkpoint has none."""

Configure = Callable[[LoadPlan, None, Mapping[str, Any], Mapping[str, Any]], tuple[Any, Any]]
"""Return the library's class for a plan's model, and its configuration; see `model._configure`."""


def fuse(
    made: Any,  # noqa: ANN401
    config: Any,  # noqa: ANN401
    plan: LoadPlan,
    draft: Path,
    keywords: Mapping[str, Any],
    configure: Configure,
) -> Any:  # noqa: ANN401
    """Give a model's configuration its draft model; return the class to make the application of.

    `draft`: its folder; `keywords`: of the model's `NeuronConfig`.
    """
    changes = plan.arguments.fused_draft
    drafting, of_draft = configure(replace(plan, model_dir=draft), None, keywords, changes)
    eagle = of_draft.neuron_config.is_eagle_draft
    if eagle:
        of_draft.tie_word_embeddings = False
    # Not before 0.7, where both models are of one class.
    another = {} if drafting is made else {"draft_model_cls": drafting}
    kind = importlib.import_module(f"{type(config.neuron_config).__module__}").FusedSpecNeuronConfig
    config.fused_spec_config = kind(
        made._model_cls, draft_config=of_draft, draft_model_path=str(draft), **another
    )

    class Fused(made):  # type: ignore[misc]
        """The library's class, which keeps in the class itself whose weights it reads, and up to 0.6 which model."""

        def checkpoint_loader_fn(self, *args: Any, **more: Any) -> Any:  # noqa: ANN401
            convert = drafting.convert_hf_to_neuron_state_dict
            drafting.convert_hf_to_neuron_state_dict = staticmethod(
                lambda weights, own: convert(_renamed(weights, own), own)
            )
            try:
                weights = super().checkpoint_loader_fn(*args, **more)
            finally:
                drafting.convert_hf_to_neuron_state_dict = staticmethod(convert)
                drafting._FUSED_PREFIX = ""
            for name in _SHARED if eagle else ():
                if (own := f"draft_model.{name}") not in weights:
                    weights[own] = weights[f"target_model.{name}"].clone()
            return weights

    Fused.__name__, Fused.__module__ = made.__name__, made.__module__
    return Fused


def _renamed(weights: dict[str, Any], config: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a checkpoint with the names and the vocabulary that the library reads: EAGLE3's have others.

    Tokens that such a draft never proposes get the mean of all rows, whose logit is below the largest.

    Raises:
        ArtifactError: the tokens of its output layer are not those of the vocabulary.
    """
    if not config.neuron_config.is_eagle_draft:
        return weights
    found = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    offsets = found.pop("d2t", None)
    found.pop("t2d", None)
    if offsets is not None:
        head, size = found.get("lm_head.weight", ()), config.vocab_size
        ids = np.arange(len(offsets)) + offsets.long().numpy()
        if len(head) != len(ids) or not ((ids >= 0) & (ids < size)).all():
            message = (
                f"d2t of the draft model has {len(ids)} tokens, and lm_head.weight {len(head)} rows; expected equally "
                f"many, and tokens below {size}. It is of another model, or damaged"
            )
            raise ArtifactError(message)
        rows = head.float().mean(0).to(head.dtype).repeat(size, 1)
        rows[ids] = head
        found["lm_head.weight"] = rows
    return found


def accepted(output: Any, starts: Int32Array | None) -> Int32Array:  # noqa: ANN401
    """Return int32[B, K], the tokens of a call; those that are not accepted are -1.

    `starts`: int32[B, 1], the positions of a decode's rows; None for a prompt, which gives one token. The library fills
    with 0 up to 0.7 and with -1 from 0.8 on, so the next position counts.
    """
    found, *_, next_positions = output.fused_outputs[:4]
    count = 1 if starts is None else next_positions.numpy() - starts
    ids = found.numpy()
    return np.where(np.arange(ids.shape[1]) < count, ids, -1).astype(np.int32)
