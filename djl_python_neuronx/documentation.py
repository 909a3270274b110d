"""``djl-neuronx options``: the documentation of options, as docs/options.md has it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from djl_python_neuronx.errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status of the process.

    Raises:
        ConfigError: there is no such option.
    """
    from djl_python_neuronx.config.options import SECTIONS

    if not arguments.names:
        for title, names in SECTIONS.items():
            sys.stdout.write(f"{title}\n    {', '.join(names)}\n")
        return 0
    # In a wheel the pages are in the package; in a checkout they are beside it.
    package = Path(__file__).parent
    pages = (folder / "docs" / "options.md" for folder in (package, package.parent))
    text = next(page for page in pages if page.is_file()).read_text(encoding="utf-8")
    wrong = []
    for given in arguments.names:
        shown, problem = _documented(given, text)
        sys.stdout.write(shown)
        wrong += [problem] if problem else []
    if wrong:
        msg = f"{'; '.join(wrong)}; `djl-neuronx options` lists all"
        raise ConfigError(msg)
    return 0


def _documented(given: str, page: str) -> tuple[str, str]:
    """The text of the page about an option, by any name, variable or flag of it, and the problem of an unknown name."""
    from djl_python_neuronx.config.hints import unknown
    from djl_python_neuronx.config.options import NAMES
    from djl_python_neuronx.config.other_servers import NEUTRAL, SAME
    from djl_python_neuronx.config.sources import OPTION_VARIABLES, PREFIXES

    name = given.removeprefix("option.").lstrip("-").replace("-", "_")
    name = OPTION_VARIABLES.get(name.upper(), name)
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    name = name.removeprefix(prefix).lower()
    name = NAMES.get(name, SAME.get(name, name))
    _, found, section = page.partition(f"\n### {name}\n")
    if found:
        return f"### {name}\n{section.partition(chr(10) + '#')[0].rstrip()}\n", ""
    for title in ("Ignored options", "Unsupported options"):
        table = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for row in table.splitlines():
            if row.startswith(f"| `{name}` |"):
                return f"### {name}\n{title}: {row.split('|')[2].strip()}\n", ""
    if name in NEUTRAL:
        values = " or ".join(NEUTRAL[name]) or "the model's own"
        return f"### {name}\nA flag of vLLM without an option here; accepted: {values}\n", ""
    return "", f"there is no option {given!r}{unknown(name, None, NAMES)}"
