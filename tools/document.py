"""Generator of serving.properties.example and of the generated pages of docs/.

``python -m tools.document options`` (or another word of `main`: ``example``, ``support`` …) writes one of them to
standard output; `make docs` writes all files.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path

from pydantic import BaseModel

from djl_python_neuronx.artifacts.tokenizer import TokenTable
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.djl_serving import ARGUMENTS
from djl_python_neuronx.config.legacy import IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import SECTIONS, ServingOptions, allowed_values, option
from djl_python_neuronx.config.other_servers import SAME
from djl_python_neuronx.config.values import Option, join_words
from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.fields import Field
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.nxdi import contrib, versions
from djl_python_neuronx.planning.sdks import DRIVER, TRANSFORMERS, Sdk, table
from djl_python_neuronx.protocol.base import ParseContext, WireProtocol
from djl_python_neuronx.protocol.bedrock import BedrockProtocol, BedrockRequest
from djl_python_neuronx.protocol.lmi import LmiProtocol
from djl_python_neuronx.protocol.openai_chat import ChatParameters, ChatProtocol
from djl_python_neuronx.protocol.openai_completions import CompletionParameters, CompletionProtocol
from djl_python_neuronx.protocol.plain import PlainProtocol, PlainRequest
from djl_python_neuronx.protocol.text_generation import Parameters
from djl_python_neuronx.protocol.tgi import TgiProtocol
from djl_python_neuronx.telemetry import METRICS, NAMESPACE
from tools import recipes

ROOT = Path(__file__).parents[1]

_OPTIONS_HEAD = """\
# Options

Generated from the option fields in `djl_python_neuronx/config/` by `make docs`. Edit the fields there, not this file.

In `serving.properties` an option is written `option.<name>=<value>`, in the environment `OPTION_<NAME>`. Precedence,
highest first:

1. the command line,
2. SageMaker's variables (`SAGEMAKER_*`),
3. `option.*` in `serving.properties`,
4. `HF_MODEL_ID`, `HF_REVISION` and `HF_TASK`,
5. `OPTION_*` variables,
6. keys without the prefix, then `ARGS_*` variables (arguments of DJL Serving, such as `batch_size`),
7. the environment variables listed with the options, and those of other servers ("Other variables", at the end),
8. a value derived from the model and the machine, then the default.

A setting that another one overrides leaves a note, unless it is an option of the file or of `OPTION_*` and the command
line overrides it.

An empty value counts as not set, and so does `None` where the default is not set. A name that is not listed here is an
error.

Lists are written `256,512,1024`, as JSON or as a Python literal; objects as JSON or as a Python literal. Booleans are
`true` or `false` (also `1`, `yes`, `on`; `0`, `no`, `off`). Words are not case-sensitive.

*Not set* means that the library chooses the value, or that it is derived from the model and the machine where the text
says so. The last lines of an option name its equivalent in transformers-neuronx (TNX) and in NxD Inference (NxDI): a
keyword, `keyword.field`, a compiler `--flag`, a `VARIABLE` or a `method()`. If a library has no equivalent, an option
that only changes speed or memory is *ignored*, with a note, and any other is an *error*. The cpu backend ignores
options of the libraries.
"""

_VARIABLES_HEAD = """\
## Other variables

Variables of SageMaker, of the Hugging Face hub, of TGI and of vLLM with its Neuron plugin. The
`SAGEMAKER_*` ones override `serving.properties`. The others apply only if the option is not set there. Of several for
one option the first in the table counts, and a note names the others; only the lengths in `NEURON_TOKEN_GEN_BUCKETS`
are added to a longer `n_positions`.

`SM_VLLM_<FLAG>` and `SM_ON_<FLAG>`, of vLLM's and Hugging Face's images on SageMaker, set what that flag of
`djl-neuronx serve` sets. Other variables of these servers set nothing here: a warning says what to do.
"""

_IGNORED_HEAD = """\
## Ignored options

Options of the old engine and of DJL Serving. They are accepted and set nothing here; the log lists those that are set.
The variables in `env` are set all the same: see [security.md](security.md#optionenv).
"""

_UNSUPPORTED_HEAD = """\
## Unsupported options

Options of the old engine, and keywords of NxD Inference for features that are not served, such as Medusa. Values that
turn the option off are accepted, any other value is an error.
"""

_EXAMPLE_HEAD = """\
# Every option of a model folder with its default (docs/options.md has those that only the command line and the
# environment may set). Copy this file to serving.properties beside the model and uncomment what you change.
# Generated from the option fields in djl_python_neuronx/config/ by `make docs`.

# For DJL Serving: the handler, and one of the two ways to batch (`auto` serves one request at a time).
engine=Python
option.entryPoint=djl_python_neuronx.handler
option.async_mode=true

# Read by DJL Serving itself, without `option.`: deaths of the process that it may heal, and one process for the model.
{arguments}
"""


_ARCHITECTURES_HEAD = """\
# Architectures

Generated from `capabilities.py` and `fields.py` of `djl_python_neuronx/planning/tnx/` and `…/nxdi/` by `make docs`.
Edit those files, not this one.

Features of each library for each `model_type`, compared with Hugging Face's logits on tiny models with random weights
and an emulated device; architectures in italics were read, but not run. An option that an architecture does not support
is an error or, if it only changes speed or memory, ignored with a note: see `djl-neuronx check`.
[options.md](options.md) explains the options.
"""

_CONTRIB_HEAD = """\
## Models outside NxD Inference

Folders below `contrib/models` of NxD Inference's repository, for `option.nxdi_model_code`
([options.md](options.md#nxdi_model_code)). Generated from `djl_python_neuronx/planning/nxdi/contrib.toml`, which a run
on the CPU rig of NxD Inference 0.9 has filled: a tiny random checkpoint of each, in float32, behind the HTTP server,
continuous batches with joins and slots reused. Each logit is compared with transformers' after the same tokens, on 1
and on 2 cores. A row is about the source with its digest alone. Folders that are not here were not run: they take
images or sound, or transformers 4.57 has no class of their model (GLM-5.2, MiniMax-M3, Qwen3.5, Trinity).

*right*: equal on these numbers of cores; anything else is refused unless `nxdi_model_code_unverified=true`. *with*:
most tokens of a sequence, and what this package sets or changes, in memory; fixes are in
`djl_python_neuronx/backends/nxdi/contrib/fixes.py`. A *stand-in* is another class of transformers that computes the
same, where it has none of the model's own. Switches of config.json other than those compared, such as another
activation or a bias, are refused too: `check` names them.
"""

_FIELDS_HEAD = """\
## Fields of config.json

Every field that changes a number, as each class of a library treats it; tests compare a value of each with Hugging
Face's logits. *read*: as transformers does. *translated*: into the names that the library reads, whichever version of
transformers wrote the file. Otherwise the library computes what is listed, whatever the value is: values at which it
would *stop* are refused, and those that it gets *wrong* unless `allow_known_defects=true`; a warning names what is
*near*, by at most 0.0005. Bold: transformers' value where the field is absent.
"""

_SUPPORT_HEAD = """\
# Support matrix

Generated from the tables in `djl_python_neuronx/planning/` (`sdks.toml`, `nxdi/versions.toml`, `nxdi/contrib.toml`,
`capabilities.py`) by `make docs`. Edit those files, not this one.

| | |
| --- | --- |
| Python | 3.10 and newer; on a Neuron machine those of its SDK |
| Neuron SDK | 2.21 to 2.31, below |
| DJL Serving | 0.36 is tested; older ones by `option.rolling_batch=tnx` ([djl.md](djl.md#tested-with)) |
| chips | Inferentia2 (Inf2) and Trainium (Trn1); `check` plans for Trn2 too |

Nothing here was run on a device ([nxdi.md](nxdi.md#not-shown-without-a-device)). `djl-neuronx doctor` compares the
versions of a machine with these tables ([doctor.md](doctor.md)), `djl-neuronx check` a model.

## SDKs

The newest of each minor version, with the release numbers of its packages. *image*: `SDK=… docker/build.sh` has one
([docker](../docker/README.md)); other SDKs take a file of their own there.
"""

_MODELS_HEAD = """## Models

`model_type` of config.json, with transformers-neuronx 0.13 and each version of NxD Inference. *equal*: compared with
transformers on an emulated device, and equal. *served*: by its source or release notes, and not run.
"""

_MODELS_TAIL = """\
1. The library's repository has two releases of this version, and only the second has a class for the model; with the
   first the start fails with that reason. Which of them AWS's wheel is, is not known here.

**With the backend `cpu`**, for tests and small models: llama, mistral, mixtral, qwen2, gpt2, gpt-j, gpt-neox, opt,
gpt_bigcode and bloom are tested; an architecture that does not work with a slot cache is refused.

[architectures.md](architectures.md) has the features of each architecture, [nxdi.md](nxdi.md#versions-and-machines) the
differences between versions.
"""

_CONFLICTS_HEAD = """## Combinations that fail

What `doctor` reports, from AWS's release notes and from users.
"""

_METRICS_HEAD = """\
# Metrics

Generated from `METRICS` in `djl_python_neuronx/telemetry.py` by `make docs`. Edit that table, not this page.

The embedded server exposes these on `/metrics`, in Prometheus' text format. A histogram has `_bucket`, `_sum` and
`_count`; times are in seconds.

**Graphs.** Times of the device are counted by compiled graph. `prefill_seconds` has the `bucket` that a prompt was
padded to. `decode_seconds` has `kind`, which is `decode` or `verification` (of drafts), the `bucket` of the context,
and the `rows` that the graph computes, however many of them run. `mixed_seconds` has the `bucket` of the step's tokens,
and in `cache` the bucket of all sequences' context, 0 if graphs do not depend on it. So there are as many series as
graphs.

**Cache.** `kv_cache_used_tokens` rounds each sequence up to whole blocks where the cache has blocks; a block that
several sequences share counts for each. What the cache keeps of sequences that have ended does not count: a new prompt
takes its place. `cached_prompt_tokens_total` by `prompt_tokens_total` is the hit rate of prefixes, over all copies:
each has its own cache, and a request whose prefix is in a copy without a free slot runs it in another.

**CloudWatch.** With `option.cloudwatch_namespace` the server also logs them once a minute, as a line of JSON in the
Embedded Metric Format. Wherever its log reaches CloudWatch Logs, as that of a SageMaker endpoint does, each becomes a
metric with the dimension `model`: the sum over its other labels; of counters, sums and counts what the minute has
added; without buckets. CloudWatch charges for each metric. SageMaker's "detailed observability" reads `/metrics` itself
(port 8080), with labels and buckets, for queries in PromQL, which target tracking does not take.
"""

_DEFAULTS_HEAD = """\
# Missing parameters

Generated from the request models in `djl_python_neuronx/protocol/` by `make docs`, from what they make of a request
with a prompt alone. [protocols.md](protocols.md) explains the parameters.

A dash: the protocol has no such parameter, and [refuses it](protocols.md#fields-of-other-servers) unless its value has
no effect. *sampled*: with `do_sample`, or with another parameter of sampling; else the answer is greedy. For OpenAI's
protocols the model's `generation_config.json` takes precedence, and where only the device samples its compiled
parameters do.
"""

_CAPABILITIES: Mapping[str, Callable[[Capability], bool]] = {
    "continuous batching": lambda entry: entry.continuous_batching,
    "`context_length_estimate`": lambda entry: entry.context_buckets,
    "several `n_positions`": lambda entry: entry.token_buckets,
    "degrees that do not divide the heads": lambda entry: entry.pads_heads,
    "`attention_layout=BSH`": lambda entry: entry.supports("attention_layout"),
    "`collectives_layout=BSH`": lambda entry: entry.supports("collectives_layout"),
    "greedy on the device": lambda entry: entry.supports("on_device_generation"),
    "`on_device_generation=true`": lambda entry: entry.supports("on_device_generation"),
    "`quantize`": lambda entry: entry.supports("quantize"),
    "`kv_cache_quantize`": lambda entry: entry.supports("kv_cache_quantize"),
    "`shard_over_sequence`": lambda entry: entry.supports("shard_over_sequence"),
    "`enable_chunked_prefill`": lambda entry: entry.supports("enable_chunked_prefill"),
    "`speculative_draft_model`": lambda entry: entry.speculation,
}

_ACCEPTED = "refused unless `allow_known_defects=true`"


def architectures_page() -> str:
    """Text of docs/architectures.md."""
    parts = [_ARCHITECTURES_HEAD]
    tables = [_FIELDS_HEAD]
    for backend, facts in reversed([*NEURON_BACKENDS.items()]):
        whose: dict[str, list[str]] = {}
        for name, entry in facts.architectures.items():
            for note in _notes(entry):
                whose.setdefault(note, []).append(name)
        notes = "".join(_bullet(f"{', '.join(names)}: {note}.") for note, names in whose.items())
        parts += [f"## {facts.library}", "", *_features(backend, facts.architectures), "", notes]
        tables += [f"### {facts.library}", "", *_fields(facts.architectures), ""]
    return "\n".join([*parts, _CONTRIB_HEAD, *_contributed(), "", *tables])


def _contributed() -> Iterator[str]:
    """Lines of the table of models outside NxD Inference, and the reasons of those that are not right."""
    rows = sorted(contrib.rows().values(), key=lambda row: row.folder.lower())
    right = sum(row.verdict == "right" for row in rows)
    yield f"{right} of {len(rows)} are right:"
    yield ""
    yield "| folder | model_type | right | with |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        cores = join_words([*map(str, row.degrees)]) if row.verdict == "right" else "–"
        yield f"| {row.folder} | {', '.join(row.model_types)} | {cores} | {'; '.join(_given(row))} |"
    yield ""
    whose: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict != "right":
            whose.setdefault(row.reason, []).append(row.folder)
    for reason, folders in whose.items():
        yield _bullet(f"{', '.join(folders)}: {reason}.").rstrip()


def _given(row: contrib.Row) -> Iterator[str]:
    """Limits of a contributed model, and what it is loaded with."""
    if row.stand_in:
        yield f"stand-in {row.stand_in}"
    if row.verdict != "right":
        return
    if row.fix:
        yield f"fix `{row.fix}`"
    yield from (f"`{name}={_plain(value)}`" for name, value in row.values.items())
    yield from (f"no `{name}`" for name in row.unset)
    if row.longest not in {None, "max_position_embeddings"}:
        yield f"up to `{row.longest}`"
    if row.slots is not None:
        yield f"{row.slots} slots at most"
    if row.rotary != ("default",):
        yield f"{join_words(row.rotary, 'or')} rope"


def _features(backend: str, columns: Mapping[str, Capability]) -> Iterator[str]:
    """Lines of the table of features, without those that only the other library has."""
    heads = (name if entry.verified else f"*{name}*" for name, entry in columns.items())
    yield f"| | {' | '.join(heads)} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for title, can in _CAPABILITIES.items():
        named = re.search(r"`(\w+)", title)
        if named is None or backend in option(named[1]).to:
            able = ("yes" if can(entry) else "–" for entry in columns.values())
            yield f"| {title} | {' | '.join(able)} |"


def _fields(architectures: Mapping[str, Capability]) -> Iterator[str]:
    """Lines of the table of fields; a line for all architectures that make the same of one."""
    whose: dict[tuple[str, str], list[str]] = {}
    for name, entry in architectures.items():
        for field, treatment in entry.fields.items():
            whose.setdefault((field, _treatment(treatment)), []).append(name)
    yield "| field | library computes | other values | architectures |"
    yield "| --- | --- | --- | --- |"
    for (field, cells), names in sorted(whose.items()):
        row = f"| `{field}` | {cells} | "
        for part in textwrap.wrap(", ".join(names), 118 - len(row)):
            yield f"{row}{part.rstrip(',')} |"


def _treatment(field: Field) -> str:
    if not field.computes and field.right is None:
        return f"{field.does} | "
    given = [each for each in field.computes if each is not None]
    values = ", ".join(
        f"**`{_plain(v)}`**" if v == field.default else f"`{_plain(v)}`" for v in given
    )
    near = "".join(f"`{each}` near, " for each in field.near)
    return f"{values or field.does} | {near}{'stop' if field.stops else 'wrong'}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def support_page() -> str:
    """Text of docs/support.md."""
    heads = (
        "SDK",
        "Python",
        "driver",
        "compiler",
        "torch-neuronx",
        *_LIBRARIES.values(),
        TRANSFORMERS,
        "image",
    )
    sdks = (next(group) for _, group in groupby(table().sdk, key=_minor))
    failing = (
        f"{conflict.level}: {conflict.problem}. {conflict.fix[0].upper()}{conflict.fix[1:]}."
        for conflict in table().conflict
    )
    parts = (
        _SUPPORT_HEAD,
        *_lines(heads, map(_sdk, sdks)),
        "",
        _MODELS_HEAD,
        *_models(),
        "",
        _MODELS_TAIL,
        _outside(),
        _CONFLICTS_HEAD,
        "".join(map(_bullet, failing)),
    )
    return "\n".join(parts).rstrip() + "\n"


_LIBRARIES = {
    "neuronx-distributed-inference": "NxD Inference",
    "transformers-neuronx": "transformers-neuronx",
}
_RUN = ("0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
"""Releases of NxD Inference that the tests run on a CPU rig."""


def _lines(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a table."""
    heads = tuple(heads)
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(cells)} |"


def _minor(sdk: Sdk) -> str:
    return ".".join(sdk.version.split(".")[:2])


def _sdk(sdk: Sdk) -> Iterator[str]:
    """Cells of an SDK; of a package the first numbers of its newest version."""
    yield sdk.version
    yield ", ".join(version for version in sdk.python if version not in {"3.8", "3.9"})
    served = {release.version for release in versions.releases()}
    for package in (DRIVER, "neuronx-cc", "torch-neuronx", *_LIBRARIES, TRANSFORMERS):
        found = ".".join(sdk.packages.get(package, ("–",))[0].split(".")[:2])
        yield (
            f"{found}, not served"
            if package in [*_LIBRARIES][:1] and found not in {*served, "–"}
            else found
        )
    yield "yes" if (ROOT / f"docker/sdk-{_minor(sdk)}.env").exists() else "–"


def _models() -> Iterator[str]:
    """Lines of the table of models."""
    releases = [*dict.fromkeys(release.version for release in versions.releases())]
    tnx, nxdi = (NEURON_BACKENDS[name].architectures for name in ("tnx", "nxdi"))

    def cell(model_type: str, release: str) -> str:
        first = versions.first_release(model_type)
        if model_type not in nxdi or versions.numbers(first.version) > versions.numbers(release):
            return "–"
        ran = release in _RUN and nxdi[model_type].verified
        return ("equal" if ran else "served") + " ¹" * bool(first.name and release == first.version)

    heads = ("model_type", "transformers-neuronx", *releases)
    rows = (
        (name, "equal" if name in tnx else "–", *(cell(name, release) for release in releases))
        for name in sorted({*tnx, *nxdi})
    )
    return _lines(heads, rows)


def _outside() -> str:
    """Paragraph about the models outside of NxD Inference that are right."""
    rows = (row for row in contrib.rows().values() if row.verdict == "right")
    right = {name for row in rows for name in row.model_types}
    names = join_words(sorted(right - NEURON_BACKENDS["nxdi"].architectures.keys()))
    where = "[architectures.md](architectures.md#models-outside-nxd-inference)"
    text = f"**Outside of the library**, with NxD Inference 0.9 and 0.10, and within the limits in {where}: {names}."
    return "\n".join([*textwrap.wrap(text, 118, break_on_hyphens=False), ""])


def metrics_page() -> str:
    """Text of docs/metrics.md."""
    lines = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for name, metric in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{NAMESPACE}_{name}` | {metric.kind} | {labels} | {metric.doc} |")
    return "\n".join([_METRICS_HEAD, *lines, ""])


class _NoTokenizer(TokenTable):
    """Stands in for a tokenizer: each text is one token."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:  # noqa: ARG002
        """See `Tokenizer`."""
        return [0]

    def encode_chat(self, messages: object, **how: object) -> list[int]:  # noqa: ARG002
        """See `Tokenizer`."""
        return [0]


_MESSAGE = {"role": "user", "content": "a"}
_COLUMNS: Mapping[str, tuple[WireProtocol, type[BaseModel], str, Mapping[str, object]]] = {
    "LMI": (LmiProtocol(), Parameters, "", {"inputs": "a"}),
    "TGI": (TgiProtocol(), Parameters, "/generate", {"inputs": "a"}),
    "OpenAI chats": (ChatProtocol(), ChatParameters, "", {"messages": [_MESSAGE]}),
    "OpenAI completions": (CompletionProtocol(), CompletionParameters, "", {"prompt": "a"}),
    "Bedrock": (BedrockProtocol(), BedrockRequest, "", {"prompt": "a"}),
    "plain": (PlainProtocol(), PlainRequest, "", {"prompt": "a"}),
}
"""Protocol to its parser, the model of its parameters, a path, and its shortest request."""
_LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_gen_len")


def defaults_page() -> str:
    """Text of docs/defaults.md."""
    found = {title: _defaults(*column) for title, column in _COLUMNS.items()}
    lines = [f"| parameter | {' | '.join(found)} |", f"| --- |{' --- |' * len(found)}"]
    for name in sorted({name for cells in found.values() for name in cells}):
        cells = (cells.get(name, "–") for cells in found.values())
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([_DEFAULTS_HEAD, *lines, ""])


def _defaults(
    protocol: WireProtocol, model: type[BaseModel], path: str, payload: Mapping[str, object]
) -> dict[str, str]:
    """Parameter to what a request means that lacks it."""
    context = ParseContext(
        tokenizer=_NoTokenizer({}, frozenset(), None),
        path=path,
        vocab_size=1,
        options=ServingOptions(model_name=("a",)),
    )
    request = protocol.parse(payload, context).request
    meant = {**vars(request.sampling)}
    meant |= dict.fromkeys(_LIMITS, request.max_new_tokens or "what fits")
    cells = {
        name: _missing(meant.get(name, field.get_default(call_default_factory=True)))
        for name, field in model.model_fields.items()
        if not field.is_required() and name not in {"model", "stream_options"}
    }
    if "do_sample" in cells:
        sampled = protocol.parse({**payload, "parameters": {"do_sample": True}}, context).request
        cells["temperature"] += f"; sampled `{sampled.sampling.temperature}`"
        cells["do_sample"] = "[see there](protocols.md#lmi)"
    return cells


def _missing(default: object) -> str:
    if default in (None, math.inf, [], (), {}):
        return "none"
    return default if default == "what fits" else f"`{json.dumps(default)}`"


def _notes(entry: Capability) -> Iterator[str]:
    """Limits and defects of an architecture."""
    if not entry.continuous_batching:
        yield "static batches: when a sequence joins, all are prefilled again"
    for defect in entry.defects:
        names = ", ".join(f"`{option}`" for option in defect.names)
        yield f"{defect.problem} ({names}; {'refused' if defect.stops else _ACCEPTED})"
    if entry.bsh_collectives:
        yield f"{entry.bsh_collectives}: `collectives_layout=BSH` needs `attention_layout=BSH`"
    yield from (
        f"`{option}` is refused: {reason}" for option, reason in entry.unsupported_options.items()
    )


def descriptions() -> Mapping[str, str]:
    """Option name to the docstring below its field, on one line."""
    texts = {name: text for group in ServingOptions.__bases__ for name, text in _documented(group)}
    return {name: texts[name] for name in ServingOptions.model_fields}


def options_page() -> str:
    """Text of docs/options.md."""
    texts = descriptions()
    chapters = "\n".join(
        f"## {title}\n\n" + "\n".join(_section(name, texts[name]) for name in names)
        for title, names in SECTIONS.items()
    )
    contents = "".join(f"- [{title}](#{_anchor(title)})\n" for title in SECTIONS)
    given = sources.OPTION_VARIABLES
    others = {*sources.SAGEMAKER, *sources.HUB, *sources.TGI, *sources.TGI_MODEL, *SAME}
    shared = {given[variable] for variable in others & given.keys()}
    variables = {
        variable: f"`{given[variable]}`"
        for variable in sorted(given, key=given.__getitem__)
        if given[variable] in shared
    }
    accepted = {
        name: ", ".join(entry.neutral) or "none" for name, entry in sorted(UNSUPPORTED.items())
    }
    tables = (
        f"{_VARIABLES_HEAD}\n{_table('variable', 'option', variables)}",
        f"{_IGNORED_HEAD}\n{_table('name', 'reason', dict(sorted(IGNORED.items())))}",
        f"{_UNSUPPORTED_HEAD}\n{_table('name', 'accepted values', accepted)}",
    )
    return "\n".join((_OPTIONS_HEAD, contents, chapters, *tables))


def example_file() -> str:
    """Text of serving.properties.example."""
    texts = descriptions()
    blocks = []
    for title, names in SECTIONS.items():
        blocks.append(f"# --- {title} ---")
        for name in names:
            marker = option(name)
            if name in {"model_dir", "async_mode"} or marker.operator:
                continue
            default = _shown(ServingOptions.model_fields[name].default)
            if marker.djl.reads == "cores":
                default = "max"  # DJL Serving takes no empty number
            lines = textwrap.wrap(f"{texts[name]} Allowed: {allowed_values(name)}.", 110)
            commented = "".join(f"# {line}\n" for line in lines)
            blocks.append(f"{commented}#option.{name}={default}")
    arguments = "\n".join(f"{name}={value}" for name, value in ARGUMENTS.items())
    return _EXAMPLE_HEAD.format(arguments=arguments) + "\n" + "\n\n".join(blocks) + "\n"


def equivalents(name: str) -> str:
    """Each library's equivalent of an option; empty for an option of the server itself."""
    marker = option(name)
    missing = f"not supported ({'ignored' if marker.tunes else 'error'})"
    return "; ".join(
        f"{facts.library}: `{marker.to[backend]}`"
        if backend in marker.to
        else f"{facts.library}: {missing}"
        for backend, facts in reversed([*NEURON_BACKENDS.items()])
        if marker.to
    )


def _documented(group: type) -> Iterator[tuple[str, str]]:
    """The fields of one class with the texts below them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(group)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    for node, below in pairwise(body):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _table(left: str, right: str, rows: Mapping[str, str]) -> str:
    lines = (f"| `{name}` | {text} |\n" for name, text in rows.items())
    return f"| {left} | {right} |\n| --- | --- |\n{''.join(lines)}"


def _section(name: str, text: str) -> str:
    wrapped = "\n".join(textwrap.wrap(text, 118, break_on_hyphens=False))
    facts = "".join(map(_bullet, _facts(name, option(name))))
    return f"### {name}\n\n{wrapped}\n\n{facts}"


def _bullet(text: str) -> str:
    wrapped = textwrap.wrap(text, 116, break_on_hyphens=False)
    return "- " + "\n  ".join(wrapped) + "\n"


def _facts(name: str, marker: Option) -> Iterator[str]:
    default = _shown(ServingOptions.model_fields[name].default)
    file = "" if not marker.file or "file" in allowed_values(name) else ", or a file that holds it"
    yield f"Values: {allowed_values(name)}{file}."
    yield f"Default: {f'`{default}`' if default else 'not set'}."
    if marker.aliases:
        yield f"Aliases: {', '.join(f'`{alias}`' for alias in marker.aliases)}."
    if marker.env:
        yield f"Environment variable: {', '.join(f'`{variable}`' for variable in marker.env)}."
    if words := equivalents(name):
        yield f"{words}."


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


def main(which: str) -> None:
    """Write one of the files to standard output."""
    pages: Mapping[str, Callable[[], str]] = {
        "options": options_page,
        "example": example_file,
        "architectures": architectures_page,
        "support": support_page,
        "metrics": metrics_page,
        "defaults": defaults_page,
        "recipes": recipes.page,
    }
    sys.stdout.write(pages[which]())


if __name__ == "__main__":
    main(sys.argv[1])
