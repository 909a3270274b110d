"""docs/options.md and serving.properties.example, made from the fields of `ServingOptions`.

``python -m djl_python_neuronx.config.document options`` (or ``example``) writes to standard output; `make docs`
puts both in place.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.legacy import IGNORED, TRANSLATED, UNSUPPORTED
from djl_python_neuronx.config.options import SECTIONS, ServingOptions, allowed_values, option
from djl_python_neuronx.config.values import Option, OptionGroup

LIBRARIES: Mapping[str, str] = {
    "tnx": "transformers-neuronx",
    "nxdi": "NxD Inference",
}
"""Loader name to the library that it drives."""

_OPTIONS_HEAD = """\
# Options

Made from the option fields in `djl_python_neuronx/config/` by `make docs`; edit the fields there, not this file.

In `serving.properties` an option is `option.<name>=<value>`, in the environment `OPTION_<NAME>`. The first of these
that gives a value wins: the command line, SageMaker's variables (`SAGEMAKER_*`), `option.*` in `serving.properties`,
`HF_MODEL_ID` and its companions, `OPTION_*`, keys without the prefix and `ARGS_*` (DJL Serving's arguments, such as
`batch_size`), the stand-in variables listed below, what follows from model and machine, the default. An empty value
counts as not given, and so does `None` where nothing is the default. A name that is not listed here is an error.

Lists are written `256,512,1024`, as JSON or as a Python literal, objects as JSON or as a Python literal. Booleans are
`true` or `false` (`1`, `yes`, `on`; `0`, `no`, `off`). Words have no case.

"Not set" leaves a value to the library, or to the model and the machine where the text says so. *Library* tells what
an option is in transformers-neuronx (`tnx`) and NxD Inference (`nxdi`): a keyword, `keyword.field`, a compiler
`--flag`, a `VARIABLE` or a `method()`. A library without an equivalent gets the option *left out*, with a note, if it
only changes speed or memory; else the option is *refused*. The cpu loader needs none of the options that belong to a
library.
"""

_TRANSLATED_HEAD = """\
## Other names

Names of the old engine for a value of an option.
"""

_VARIABLES_HEAD = """\
## Other variables

What SageMaker sets and what users of the hub's own containers know. The `SAGEMAKER_*` ones overrule the
file, the others stand in for what is not set.
"""

_IGNORED_HEAD = """\
## Ignored options

Options of the old engine and of DJL Serving. They are accepted and do nothing; the log lists the ones that are set.
"""

_UNSUPPORTED_HEAD = """\
## Options that this version does not support

Options of the old engine. A value that asks for nothing is accepted, every other is an error.
"""

_EXAMPLE_HEAD = """\
# Every option with its default. Copy to serving.properties beside the model and uncomment what you change.
# Made from the option fields in djl_python_neuronx/config/ by `make docs`.

# For DJL Serving: the handler, and one of the two ways to batch (`auto` would serve one request at a time).
engine=Python
option.entryPoint=djl_python_neuronx.handler
option.async_mode=true
"""


def descriptions() -> Mapping[str, str]:
    """Option name to the text below its field, on one line."""
    texts = {
        name: text
        for group in ServingOptions.__mro__
        if issubclass(group, OptionGroup)
        for name, text in _documented(group)
    }
    return {name: texts[name] for name in ServingOptions.model_fields}


def options_page() -> str:
    """The whole of docs/options.md."""
    texts = descriptions()
    chapters = "\n".join(
        f"## {title}\n\n" + "\n".join(_section(name, texts[name]) for name in names)
        for title, names in SECTIONS.items()
    )
    contents = "".join(f"- [{title}](#{_anchor(title)})\n" for title in SECTIONS)
    translated = {
        name: ", ".join(
            f"`{value}`: " + (f"`{entry.option}={meant}`" if meant else "nothing")
            for value, meant in entry.values.items()
            if value in {"true", "false"}
        )
        for name, entry in TRANSLATED.items()
    }
    others = {**sources.SAGEMAKER, **sources.HUB, **sources.TGI}
    variables = {variable: f"`{name}`" for variable, name in others.items()}
    ignored = {name: entry.reason for name, entry in IGNORED.items()}
    accepted = {name: ", ".join(entry.neutral) or "none" for name, entry in UNSUPPORTED.items()}
    tables = (
        f"{_TRANSLATED_HEAD}\n{_table('name', 'its values', translated)}",
        f"{_VARIABLES_HEAD}\n{_table('variable', 'option', variables)}",
        f"{_IGNORED_HEAD}\n{_table('name', 'why', ignored)}",
        f"{_UNSUPPORTED_HEAD}\n{_table('name', 'accepted values, which ask for nothing', accepted)}",
    )
    return "\n".join((_OPTIONS_HEAD, contents, chapters, *tables))


def example_file() -> str:
    """The whole of serving.properties.example."""
    texts = descriptions()
    blocks = []
    for title, names in SECTIONS.items():
        blocks.append(f"# --- {title} ---")
        for name in names:
            if name in {"model_dir", "async_mode"}:
                continue
            default = _shown(ServingOptions.model_fields[name].default)
            lines = textwrap.wrap(f"{texts[name]} Allowed: {allowed_values(name)}.", 110)
            commented = "".join(f"# {line}\n" for line in lines)
            blocks.append(f"{commented}#option.{name}={default}")
    return _EXAMPLE_HEAD + "\n" + "\n\n".join(blocks) + "\n"


def equivalents(name: str) -> str:
    """What an option is in each library, in words; empty for an option that is ours alone."""
    marker = option(name)
    missing = "left out" if marker.tunes else "refused"
    return ", ".join(
        f"{loader} `{marker.to[loader]}`" if loader in marker.to else f"{loader} none ({missing})"
        for loader in LIBRARIES
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
    lines = (f"| `{name}` | {text} |\n" for name, text in sorted(rows.items()))
    return f"| {left} | {right} |\n| --- | --- |\n{''.join(lines)}"


def _section(name: str, text: str) -> str:
    wrapped = "\n".join(textwrap.wrap(text, 118, break_on_hyphens=False))
    facts = "".join(f"- {fact}\n" for fact in _facts(name, option(name)))
    return f"### {name}\n\n{wrapped}\n\n{facts}"


def _facts(name: str, marker: Option) -> Iterator[str]:
    default = _shown(ServingOptions.model_fields[name].default)
    file = "" if not marker.file or "file" in marker.allowed else ", or a file that holds it"
    yield f"Values: {allowed_values(name)}{file}."
    yield f"Default: {f'`{default}`' if default else 'not set'}."
    if marker.aliases:
        yield f"Also written {', '.join(f'`{alias}`' for alias in marker.aliases)}."
    if marker.env:
        yield f"Stand-in variable: {', '.join(f'`{variable}`' for variable in marker.env)}."
    if words := equivalents(name):
        yield f"Library: {words}."


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


def main(which: str) -> None:
    """Write one of the two files to standard output."""
    pages: Mapping[str, Callable[[], str]] = {"options": options_page, "example": example_file}
    sys.stdout.write(pages[which]())


if __name__ == "__main__":
    main(sys.argv[1])
