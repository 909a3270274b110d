"""docs/options.md and serving.properties.example, made from the fields of `ServingOptions`.

``python -m djl_python_neuronx.config.document options`` (or ``example``) writes to standard output; `make docs`
puts both in place.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from itertools import pairwise

from djl_python_neuronx.config.legacy import IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import ServingOptions, allowed_values, option

_OPTIONS_HEAD = """\
# Options

Made from `djl_python_neuronx/config/options.py` by `make docs`; edit the fields there, not this file.

In `serving.properties` an option is `option.<name>=<value>`, in the environment `OPTION_<NAME>`. The first of these
that gives a value wins: the command line, what DJL Serving passes, `serving.properties`, `OPTION_*`, the stand-in
variables listed below, the default. An empty value counts as not given. A name that is not listed here is an error;
the log of a start shows each value with its origin.
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
# Made from djl_python_neuronx/config/options.py by `make docs`.

# For DJL Serving: the handler, and one of the two ways to batch (`auto` would serve one request at a time).
engine=Python
option.entryPoint=djl_python_neuronx.handler
option.async_mode=true
"""


def descriptions() -> Mapping[str, str]:
    """Option name to the text below its field, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(ServingOptions)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    found: dict[str, str] = {}
    for node, below in pairwise(body):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def options_page() -> str:
    """The whole of docs/options.md."""
    texts = descriptions()
    sections = "\n".join(_section(name, texts[name]) for name in ServingOptions.model_fields)
    ignored = _table("name", "why", {name: entry.reason for name, entry in IGNORED.items()})
    accepted = {name: ", ".join(entry.neutral) or "none" for name, entry in UNSUPPORTED.items()}
    unsupported = _table("name", "accepted values, which ask for nothing", accepted)
    return f"{_OPTIONS_HEAD}\n{sections}\n{_IGNORED_HEAD}\n{ignored}\n{_UNSUPPORTED_HEAD}\n{unsupported}"


def example_file() -> str:
    """The whole of serving.properties.example."""
    texts = descriptions()
    blocks = []
    for name, entry in ServingOptions.model_fields.items():
        if name in {"model_dir", "async_mode"}:
            continue
        lines = textwrap.wrap(f"{texts[name]} Allowed: {allowed_values(name)}.", 110)
        blocks.append(
            "\n".join([*(f"# {line}" for line in lines), f"#option.{name}={_shown(entry.default)}"])
        )
    return _EXAMPLE_HEAD + "\n" + "\n\n".join(blocks) + "\n"


def _table(left: str, right: str, rows: Mapping[str, str]) -> str:
    lines = (f"| `{name}` | {text} |\n" for name, text in sorted(rows.items()))
    return f"| {left} | {right} |\n| --- | --- |\n{''.join(lines)}"


def _section(name: str, text: str) -> str:
    marker, default = option(name), _shown(ServingOptions.model_fields[name].default)
    facts = [
        f"Values: {allowed_values(name)}.",
        f"Default: {f'`{default}`' if default else 'not set'}.",
    ]
    if marker.aliases:
        facts.append(f"Also written {', '.join(f'`{alias}`' for alias in marker.aliases)}.")
    if marker.env:
        facts.append(f"Stand-in variable: {', '.join(f'`{variable}`' for variable in marker.env)}.")
    wrapped = "\n".join(textwrap.wrap(text, 118, break_on_hyphens=False))
    return f"## {name}\n\n{wrapped}\n\n" + "\n".join(f"- {fact}" for fact in facts) + "\n"


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
