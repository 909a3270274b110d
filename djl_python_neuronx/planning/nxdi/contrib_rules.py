"""Judgement of models whose code is not NxD Inference's own: what a run has shown of the code, and what it has not.

A comparison of one of the library's classes shows nothing about others: of options only those that the run had are
passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.config.values import join_words, shortened
from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.fields import ROTARY, rope_type, with_rotary
from djl_python_neuronx.planning.model import Dimensions, count
from djl_python_neuronx.planning.nxdi.capabilities import LAST_TOKENS
from djl_python_neuronx.planning.nxdi.contrib import Row
from djl_python_neuronx.planning.nxdi.versions import numbers

_OPTION, _ACCEPT = "nxdi_model_code", "nxdi_model_code_unverified"
_DEGREE = "tensor_parallel_degree"
_LAYOUT = (
    *("n_positions", "context_length_estimate", "max_rolling_batch_size", _DEGREE, "dtype"),
    *("on_device_generation", "output_logits", "override_neuron_config", "padding_side"),
)
_SERVER = (
    *(_OPTION, "nxdi_model_class", "compiled_graph_path", "save_sharded_checkpoint"),
    *("logical_nc_config", "compiler_target", "speculative_length", "speculative_draft_model"),
)
"""Options that change no number, or that other rules refuse."""
_ORIGINAL, _TO_ORIGINAL = "original_max_position_embeddings", frozenset({"yarn", "longrope"})
"""The length that positions are scaled from, and the types of them that need it: each code has another default."""
_OF_ARCHITECTURES = frozenset(
    name for name in ServingOptions.model_fields if "nxdi" in option(name).to
).difference(_LAYOUT, _SERVER)
WITH_CODE: Final = Capability(
    pads_heads=False,
    even_kv_heads=True,
    degree_divides=("hidden_size", "intermediate_size"),
    ignored_options=_OF_ARCHITECTURES,
    # It is in what all classes have in common.
    defects=(LAST_TOKENS,),
)
"""Support of every class outside the library."""


def findings(case: Case) -> Iterator[Finding]:
    """Yield what the run on the rig did not show of the model's code with these options: errors, unless accepted."""
    code = case.code
    if code is None:
        return
    if not code.digest:
        problem = "not judged: a start fetches the code, and refuses what was never compared; name a folder"
        yield Finding((_OPTION,), problem, "warning")
        return
    what = f"the code in {code.folder} (SHA-256 {code.digest})"
    for names, problem, fix in _doubts(case, code.row):
        if case.options.nxdi_model_code_unverified:
            text = f"{what} {problem}: compare its answers"
            yield Finding((*names, _ACCEPT), text, "warning")
        else:
            text = f"{what} {problem}; {fix or 'take other code'}, or set {_ACCEPT}=true and compare its answers"
            yield Finding(names, text)
    if code.row.verdict == "right":
        text = (
            f"{what} is {code.row.folder} of NxD Inference's contrib/models: right on a CPU rig in float32 with small "
            "random weights; bfloat16, kernels and the compiler are not shown"
        )
        if code.row.stand_in:
            text += f". It was compared with {code.row.stand_in} of transformers, which has no class for it"
        yield Finding((_OPTION,), text, "note")
    if count(case.model.config, Dimensions.of(case.model.config)) is None:
        text = "the parameter count is estimated from the sizes in config.json, as of layers like llama's"
        yield Finding((_OPTION,), text, "note")


Doubt = tuple[tuple[str, ...], str, str]
"""The options that it is about; the problem, as the end of a sentence about the code; a fix beside other code."""


def _doubts(case: Case, row: Row) -> Iterator[Doubt]:
    if row.verdict == "unknown":
        yield (_OPTION,), "was never compared with transformers", ""
    elif row.verdict != "right":
        effect = "gives wrong answers" if row.verdict == "wrong" else "does not run"
        yield (_OPTION,), f"is {row.folder}, which {effect}: it {row.reason}", ""
    else:
        yield from _of_model(case, row)
        yield from _of_options(case, row)


def _of_model(case: Case, row: Row) -> Iterator[Doubt]:
    kind, config = case.model.model_type, with_rotary(case.model.config)
    if kind not in row.model_types:
        known = join_words(row.model_types)
        yield (_OPTION,), f"was compared for model_type {known}, and not for {kind}", ""
    installed, shown = case.library_version, [numbers(release) for release in row.releases]
    if installed is not None and numbers(installed) not in shown:
        releases = join_words(row.releases, "or")
        problem = f"was compared with NxD Inference {releases}, and {installed} is installed"
        yield (_OPTION,), problem, f"install {releases}"
    if case.code is not None and case.code.foreign_graphs:
        yield (_OPTION,), "may be other code than that of the compiled graphs", ""
    scaled = [name for name in ROTARY if rope_type(config.get(name)) not in row.rotary]
    unusual = dict.fromkeys(("quantization_config", *scaled), ("absent",))
    for name, values in {**unusual, **row.only}.items():
        value = config.get(name)
        if ("absent" if value is None else value) not in values:
            problem = f"was not compared with {name}={shortened(value)} of config.json"
            yield (_OPTION,), problem, ""
    if not _TO_ORIGINAL.isdisjoint(row.rotary) and config.get(_ORIGINAL) is None:
        yield (_OPTION,), f"was not compared without {_ORIGINAL} in config.json", ""


def _of_options(case: Case, row: Row) -> Iterator[Doubt]:
    options, slots = case.options, "max_rolling_batch_size"
    if case.degree not in row.degrees:
        degrees = join_words(row.degrees, "or")
        yield (_DEGREE,), f"was compared on {degrees} cores alone", f"set {degrees}"
    longest, length = row.most_tokens(case.model), options.max_model_len or 0
    if longest is not None and length > longest:
        yield ("n_positions",), f"is right up to {longest} tokens", f"set {longest} at most"
    if row.slots is not None and case.slots > row.slots:
        yield (slots,), f"is right with {row.slots} slots at most", f"set {row.slots}"
    if case.slots > 1 and not case.continuous_batching:
        names = ("rolling_batch_strategy", slots)
        yield names, "was compared in continuous batches alone", "leave it out"
    if options.override_neuron_config:
        yield ("override_neuron_config",), "was compared without it", "leave it out"
