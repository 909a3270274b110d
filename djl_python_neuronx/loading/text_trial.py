"""Trial of a checked model's tokenizer and chat template on short texts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from djl_python_neuronx.artifacts.tokenizer import has_vocabulary
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.engine.limits import most_characters
from djl_python_neuronx.errors import ServingError, UnsupportedParameterError
from djl_python_neuronx.loading.check import Placement
from djl_python_neuronx.types import Rendering, Tokenizer

TRY_S = 30.0
"""Most time that `check` gives a tokenizer to load."""
TRY_TEXT_S = 5.0
"""Most time that `check` gives a text, whatever `option.text_timeout` the folder sets."""
_TRIED = ("Hello, 42 worlds! \u4f60\u597d", "a" * 200 + "!", " " * 200 + "\n")
"""Texts that a tokenizer is tried on: a pattern that backtracks does so on repetitions."""


def try_texts(placement: Placement) -> None:
    """Report where tokenizer or chat template fail, or go too far, on short texts. They run in separate processes.

    Nothing of a tokenizer with its own code, or without the library, is tried.
    """
    for report in placement.reports:
        prepared = report.prepared
        if prepared is None or not report.ok or prepared.options.trust_remote_code:
            continue
        folder = prepared.artifact.path
        here = folder.is_dir() and has_vocabulary(entry.name for entry in folder.iterdir())
        if not here or find_spec("transformers") is None:
            continue
        limits: dict[str, Any] = {}
        if prepared.options.text_timeout > TRY_TEXT_S:
            limits = {"timeout_s": TRY_TEXT_S, "limit": "of check"}
        with (
            report.findings.catch(),
            closing(prepared.start_tokenizer(TRY_S, **limits)) as tokenizer,
        ):
            most = most_characters(tokenizer.pieces or (), prepared.options.max_model_len or 0)
            _try(report.findings, lambda text: tokenizer.decode(tokenizer.encode(text)))
            rendering = Rendering(prepared.options.chat_template_kwargs or {})
            _try(report.findings, partial(_render, tokenizer, most, rendering))


def _render(tokenizer: Tokenizer, most: int | None, rendering: Rendering, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    with suppress(UnsupportedParameterError):  # no template
        tokenizer.encode_chat(messages, max_chars=most, rendering=rendering)


def _try(findings: Problems, call: Callable[[str], object]) -> None:
    """Report the first text on which a call fails."""
    text = ""
    try:
        for text in _TRIED:
            call(text)
    except ServingError as error:
        findings.add("warning", f"tried with {len(text)} characters: {error}")
