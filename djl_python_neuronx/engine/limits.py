"""Limits of the loaded model: a request that breaks one is refused before it is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from djl_python_neuronx.backends.base import ModelSpec, Want
from djl_python_neuronx.errors import (
    PROMPT,
    PromptTooLongError,
    RequestError,
    UnsupportedParameterError,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import EngineRequest, GenerationRequest

_GREEDY = (1.0, 1.0, 1.0)
_ON_HOST = (
    "deploy without option.on_device_generation (NxD Inference: or with option.output_logits=true)"
)


def longest_prompt(spec: ModelSpec) -> int:
    """Most tokens of a prompt: one position is kept for the first new token."""
    room = spec.max_model_len - 1
    return room if spec.mixed_steps else min(spec.prefill_buckets[-1], room)


def most_characters(pieces: Sequence[bytes] | None, num_tokens: int) -> int | None:
    """An upper bound of the characters of a prompt of `num_tokens`. None if the length of tokens is unknown.

    It leaves a factor of four for normalisers that shorten the text. `pieces`: see `Tokenizer`.
    """
    return None if pieces is None else 4 * num_tokens * max([16, *map(len, pieces)])


def check(request: GenerationRequest, spec: ModelSpec) -> None:
    """Check a request against the loaded model. Pure; any thread.

    Raises:
        PromptTooLongError: no prefill bucket holds the prompt.
        UnsupportedParameterError: only the host could apply a parameter, and the backend gives it no logits.
        RequestError: the model cannot serve it for another reason.
    """
    prompt_ids, name, longest = request.prompt_ids, request.prompt_name, longest_prompt(spec)
    scores = request.scores_prompt is not None
    if scores:  # in chunks, or by decode steps
        longest = spec.max_model_len - 1
    if not len(prompt_ids):
        msg = f"{name} has no tokens; send at least one"
        raise RequestError(msg, PROMPT)
    if len(prompt_ids) > longest:
        limits, options = f"n_positions {spec.max_model_len}", "option.n_positions"
        if not (spec.mixed_steps or scores):
            limits += f", largest prefill bucket {spec.prefill_buckets[-1]}"
            options += " or option.context_length_estimate"
        msg = (
            f"{name} has {len(prompt_ids)} tokens, this deployment takes at most {longest} ({limits}); "
            f"shorten it, or raise {options}"
        )
        raise PromptTooLongError(msg)
    _check_vocabulary(request, spec.vocab_size)
    _check_given(request, spec)
    _check_grammar(request, spec)
    _check_lengths(request)
    if not 0 <= request.adapter <= spec.num_adapters:
        msg = f"adapter {request.adapter} does not exist; expected 0 (base model) to {spec.num_adapters}"
        raise UnsupportedParameterError(msg)
    if not spec.has_logits and (reason := _host_reason(request, spec)):
        raise UnsupportedParameterError(reason)


def sampled_on_host(request: EngineRequest, spec: ModelSpec) -> bool:
    """True if the host samples all tokens of a request that `check` has passed, False if the device does."""
    return spec.has_logits and (
        Want.TOKENS not in spec.outputs or _host_reason(request, spec) is not None
    )


def _check_vocabulary(request: GenerationRequest, vocab_size: int) -> None:
    lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
    if not 0 <= lowest <= highest < vocab_size:
        msg = (
            f"{request.prompt_name} has the token id {lowest if lowest < 0 else highest}; expected ids of the model, "
            f"from 0 to {vocab_size - 1}. If it was sent as text, the tokenizer is not this model's"
        )
        raise RequestError(msg, PROMPT)
    for name, ids in (
        ("stop_token_ids", request.stop_token_ids),
        *request.sampling.token_ids(),
    ):
        outside = [one for one in ids if not 0 <= one < vocab_size]
        if outside:
            msg = (
                f"{name} has {min(outside)}; expected ids of the model, from 0 to {vocab_size - 1}"
            )
            raise RequestError(msg, name)


def _check_lengths(request: GenerationRequest) -> None:
    least, most = request.sampling.min_new_tokens, request.max_new_tokens
    if most is None:
        return
    if most < (0 if request.scores_prompt is not None else 1):
        msg = f"{request.most_name} is {most}; expected at least 1"
        raise RequestError(msg, request.most_name)
    if least > most:
        msg = f"{request.least_name} is {least}, {request.most_name} is {most}; lower the first, or raise the second"
        raise RequestError(msg, request.least_name)


def _check_given(request: EngineRequest, spec: ModelSpec) -> None:
    """Refuse given tokens after which none is left to generate, or that another model has generated."""
    given_ids, fits = request.given_ids, spec.max_model_len - len(request.prompt_ids)
    if not given_ids:
        return
    most = fits if request.max_new_tokens is None else min(request.max_new_tokens, fits)
    if len(given_ids) >= most or not 0 <= min(given_ids) <= max(given_ids) < spec.vocab_size:
        msg = (
            f"given_ids has {len(given_ids)} tokens with ids to {max(given_ids)}; expected fewer than the {most} that "
            f"are to generate, with ids below {spec.vocab_size}"
        )
        raise RequestError(msg)


def _check_grammar(request: EngineRequest, spec: ModelSpec) -> None:
    """Refuse a grammar whose text no token can end."""
    if request.grammar is not None and not (spec.eos_ids or request.stop_token_ids):
        msg = "the model has no end of text, with which a grammar could end; send stop_token_ids"
        raise UnsupportedParameterError(msg, "stop_token_ids")


def sampling_facts(spec: ModelSpec) -> dict[str, object]:
    """Facts about sampling in plain values: host, device or mixed, and within which bounds the device samples."""
    if Want.TOKENS not in spec.outputs:
        return {"place": "host"}
    facts: dict[str, object] = {"place": "mixed" if spec.has_logits else "device"}
    if spec.fixed_sampling == _GREEDY:
        facts["mode"] = "greedy"
    elif spec.fixed_sampling is not None:
        facts["mode"] = "fixed"
        facts.update(zip(("top_k", "top_p", "temperature"), spec.fixed_sampling, strict=True))
    else:
        facts["mode"] = "dynamic"
        facts["largest_top_k"] = spec.largest_top_k
        elsewhere = "host" if spec.has_logits else "refused"
        facts["without_top_k"] = spec.default_top_k or elsewhere
        facts["with_top_p"] = "device" if spec.applies_top_p else elsewhere
    return facts


def with_defaults(
    given: Mapping[str, Any], *, configured: Mapping[str, Any], spec: ModelSpec
) -> dict[str, Any]:
    """The sampling parameters of a request, with defaults for missing ones.

    `configured`: defaults of the model's author. With device-only sampling, defaults must not cause a 400: the device
    gets its compiled-in parameters, or as many tokens to sample from as it takes.
    """
    if spec.has_logits:
        return {**configured, **given}
    if spec.fixed_sampling is not None:
        top_k, top_p, temperature = spec.fixed_sampling
        fixed = {"top_k": int(top_k), "top_p": top_p, "temperature": temperature}
        differs = any(given[name] != fixed[name] for name in given.keys() & fixed.keys())
        return dict(given) if differs else {**fixed, **given}
    unusable = {*SamplingParams.HOST_NAMES, *(() if spec.applies_top_p else ("top_p",))}
    usable = {name: configured[name] for name in configured if name not in unusable}
    if (largest := spec.largest_top_k) is not None:
        usable["top_k"] = min(usable.get("top_k") or spec.default_top_k or largest, largest)
    return {**usable, **given}


def _host_reason(request: EngineRequest, spec: ModelSpec) -> str | None:
    """The reason that a sampling device cannot choose the tokens of a request, with the fix; None if it can."""
    sampling = request.sampling
    refused = request.sent_names(sampling.unsupported_on_device())
    if request.logprobs or request.top_logprobs or request.scores_prompt is not None:
        refused.append(
            "log-probabilities (details, logprobs, top_logprobs, top_n_tokens, prompt_logprobs)"
        )
    if request.grammar is not None:
        refused.append(
            "structured output (response_format, structured_outputs, guided_*, grammar, or a tool_choice of calls)"
        )
    if refused:
        return (
            f"{', '.join(refused)}: not supported, because this deployment samples on the device; "
            f"leave it out, or {_ON_HOST}"
        )
    greedy = sampling.temperature == 0 or sampling.top_k == 1
    row = _GREEDY if greedy else (sampling.top_k, sampling.top_p, sampling.temperature)
    if spec.fixed_sampling is not None and row != spec.fixed_sampling:
        return (
            f"top_k, top_p and temperature are {row}; this deployment has {spec.fixed_sampling} compiled in "
            "((1, 1, 1) is greedy, the default). Send these values, or deploy with dynamic "
            "option.on_device_generation"
        )
    largest, top_k = spec.largest_top_k, row[0] or spec.default_top_k or 0
    if largest is not None and not 1 <= top_k <= largest:
        default = (
            ""
            if top_k
            else f"deploy with option.on_device_default_top_k=global_top_k, which makes it {largest}, "
        )
        return (
            f"top_k is {sampling.top_k}{'' if top_k else ' (off)'}; this deployment samples on the device among 1 to "
            f"{largest} tokens. Send a top_k in that range, {default}or {_ON_HOST}"
        )
    if row[1] < 1 and not spec.applies_top_p:
        return (
            f"top_p is {sampling.top_p:g}; this deployment samples on a device that drops the token with which the "
            f"sum of probabilities reaches top_p. Leave top_p out, or {_ON_HOST}"
        )
    lowest, highest = spec.temperatures
    if not greedy and (row[2] < lowest or (highest is not None and row[2] > highest)):
        bounds = f"{lowest:g} {'or more' if highest is None else f'to {highest:g}'}"
        return (
            f"temperature is {row[2]:g}; this deployment samples on the device with {bounds}, or "
            f"greedily (0). Change it, or {_ON_HOST}"
        )
    return None
