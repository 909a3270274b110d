"""The distribution of the next token as Hugging Face's rules define it, and a test whether draws follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from djl_python_neuronx.sampling import SamplingParams

Float64Array = npt.NDArray[np.float64]
ALPHA = 0.001
"""Chance that right draws fail a whole table of them. Seeds are fixed, so a verdict is the same in every run."""
EOS = 2
EXCLUDING: list[dict[str, Any]] = [
    {"allowed_token_ids": tuple(range(0, 150, 3))},
    {"suppress_tokens": (6, 31), "begin_suppress_tokens": (30, 5)},
    {"bad_words": ((9,), (17, 7), (21, 17, 31), (21, 9, 30), (4, 30, 21, 17, 5))},
    {"bad_words": ((EOS,),)},
    {
        "bad_words_ids": (
            (9,),
            (EOS,),
            (17, EOS),
            (17, 8),
            (21, 17, 31),
            (21, 9, 30),
            (4, 30, 21, 17, 5),
        )
    },
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "min_new_tokens": 3},
    {"min_length": 34},
]
"""Parameters whose rules exclude tokens."""


def hugging_face(
    logits: Any,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Float64Array:
    """float64[V]: what `generate` of transformers draws from after one row of logits, in its order of processors.

    Presence and frequency penalty are OpenAI's; vLLM's `bad_words` are Hugging Face's on the output alone.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    made = pytest.importorskip("transformers", reason="transformers is not installed")
    scores = torch.as_tensor(logits, dtype=torch.float64)[None]
    if params.temperature == 0:
        params = replace(params, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, typical_p=1.0)
    ids = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    processors: list[Any] = []
    if params.logit_bias:
        biases = {(token,): float(bias) for token, bias in params.logit_bias}
        processors.append(made.SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        processors.append(made.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    for processor in processors:
        scores = processor(ids, scores)
    for token in set(output):
        scores[0, token] -= params.frequency_penalty * [*output].count(token)
        scores[0, token] -= params.presence_penalty
    masks: list[Any] = []
    if params.no_repeat_ngram_size:
        masks.append(made.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        words = [[*word] for word in params.bad_words_ids]
        masks.append(made.NoBadWordsLogitsProcessor(words, EOS))
    if params.min_length:
        masks.append(made.MinLengthLogitsProcessor(params.min_length, EOS))
    if params.min_new_tokens:
        least = made.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_new_tokens, EOS)
        masks.append(least)
    if params.allowed_token_ids is not None:
        allowed = [*params.allowed_token_ids]
        masks.append(made.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    if params.suppress_tokens:
        masks.append(made.SuppressTokensLogitsProcessor(params.suppress_tokens))
    if params.begin_suppress_tokens:
        begin = params.begin_suppress_tokens
        masks.append(made.SuppressTokensAtBeginLogitsProcessor(begin, len(prompt)))
    for mask in masks:
        scores = mask(ids, scores)
    if params.bad_words:
        mask = made.NoBadWordsLogitsProcessor([[*word] for word in params.bad_words])
        scores = mask(ids[:, len(prompt) :], scores)
    warpers = [made.TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k:
        warpers.append(made.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(made.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(made.MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(made.TypicalLogitsWarper(params.typical_p))
    for warper in warpers:
        scores = warper(None, scores)
    found: Float64Array = torch.softmax(scores[0], 0).numpy()
    return found


def p_value(drawn: Sequence[int], wanted: Float64Array) -> float:
    """The chance of a chi-square at least as large; 0 if a token was drawn that has no probability."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    counts, expected = np.bincount(drawn, minlength=len(wanted)), wanted * len(drawn)
    if counts[wanted == 0].any():
        return 0.0
    observed, mass = [0], [0.0]
    for token in expected.argsort():
        if mass[-1] >= 5:  # as many as the test needs: rare tokens share a bin
            observed.append(0)
            mass.append(0.0)
        observed[-1] += counts[token]
        mass[-1] += expected[token]
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, mass, strict=True))
    halves = torch.tensor([(len(mass) - 1) / 2, chi2 / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves)) if len(mass) > 1 else 1.0


def assert_followed(draws: Mapping[Any, tuple[Sequence[int], Float64Array]]) -> None:
    """No draws of a table differ from their distributions, with Bonferroni's correction for its size."""
    found = {name: p_value(drawn, wanted) for name, (drawn, wanted) in draws.items()}
    worst = min(found, key=lambda name: found[name])
    assert found[worst] > ALPHA / len(found), (worst, found[worst])
