"""From the settings of all sources to validated, frozen options with the origin of each value.

Strictness follows the source. A user's setting for this server (`option.*`, `OPTION_*`, command line) is an error if
it cannot be honoured. A setting that DJL Serving adds is ignored with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from djl_python_neuronx.config import djl_serving, hints, keywords, own_code, sources
from djl_python_neuronx.config.device_sampling import wrong_part
from djl_python_neuronx.config.findings import Finding, Level, Problems
from djl_python_neuronx.config.legacy import (
    DJL_ARGUMENTS,
    IGNORED,
    UNSUPPORTED,
    Unsupported,
)
from djl_python_neuronx.config.options import (
    INVALID,
    NAMES,
    SECTIONS,
    ServingOptions,
    allowed_values,
    names_where,
    option,
    parse_value,
)
from djl_python_neuronx.config.other_servers import NEUTRAL, unread
from djl_python_neuronx.config.sources import Inputs, Setting
from djl_python_neuronx.config.values import (
    MAX_SHOWN,
    PLACE,
    Option,
    as_property,
    listed,
    reordered,
    shortened,
    truth,
)
from djl_python_neuronx.errors import (
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
    UnknownOptionError,
    did_you_mean,
)

_DEFAULT = "default"
_REMARKED = {sources.FILE_NAME, sources.ENVIRONMENT, keywords.OVERRIDE}
"""Sources that the command line is meant to override, and of which two settings of one option have another message."""
_RUNS = {"trust_remote_code", "nxdi_model_code", "entryPoint", "pythonExecutable"}
_WRITTEN = {"compiled_graph_path", "draft_model_compiled_path"}
_MODELS = {"model_id", "speculative_draft_model"}
_TEMPLATES = names_where(lambda marker: marker.text_file)
_EXPLAINED = _TEMPLATES | {"sim_step_ms"}
"""Options whose parser says what is wrong."""
_UNUSED = names_where(lambda marker: marker.unused)
_PREFIX = re.compile(r"[^a-z]*([a-z]+)(?:[._-]|$)")
_LAYOUTS = ("attention_layout", "cache_layout")
_NEIGHBOURS: Mapping[str, tuple[str, ...]] = {
    "dtype": ("quantize",),
    "quantize": ("dtype",),
    **dict.fromkeys((*_LAYOUTS, "collectives_layout"), _LAYOUTS),
}
"""Option to others that its values are mistaken for."""


@dataclass(frozen=True)
class Resolved:
    """Options, the origin of each value, and what was written but has no effect."""

    options: ServingOptions
    origins: Mapping[str, str]
    """Option to the origin of its value; without options at their default."""
    ignored: Mapping[str, str]
    """Name as written to the reason why it has no effect."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Option at its default to the value that was written and is not allowed."""
    worker_variables: Mapping[str, Setting] = field(default_factory=dict, repr=False)
    """Variables that DJL Serving sets for its Python process because of `option.env`; they may be secrets."""
    for_djl: Mapping[str, str] = field(default_factory=dict)
    """Keys of `serving.properties`, as written there, that DJL Serving alone reads, but `option.env`."""
    written_for_djl: bool = False
    """DJL Serving has passed the settings, or will: they were probably written for it."""

    def explain(self) -> list[tuple[str, object, str]]:
        """Name, value and origin of every option, in the order of the documentation."""
        return [
            (
                name,
                getattr(self.options, name),
                "; ".join(filter(None, (self.origins.get(name, _DEFAULT), self.refused.get(name)))),
            )
            for names in SECTIONS.values()
            for name in names
        ]

    def describe(self, finding: Finding) -> str:
        """The finding as a sentence that lists its options with value and origin."""
        listed = " and ".join(
            f"{name}={shortened(as_property(getattr(self.options, name)))} ({self.origins.get(name, _DEFAULT)})"
            if name in ServingOptions.model_fields
            else name
            for name in finding.names
        )
        return f"{listed}: {finding.problem}" if listed else finding.problem

    def report(self, findings: Iterable[Finding], problems: Problems) -> None:
        """Add the findings to `problems`, each with the values and origins of its options.

        Errors about an option whose value is not allowed are left out: they would judge the default in its place.
        """
        for finding in findings:
            if finding.level != "error" or self.refused.keys().isdisjoint(finding.names):
                problems.add(finding.level, self.describe(finding), finding.names)


def read_settings(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    problems: Problems,
    overrides: Mapping[str, str] = MappingProxyType({}),
    *,
    file: str | None = None,
    content: bytes | None = None,
    overrides_from: str = sources.COMMAND_LINE,
    embedded: bool = False,
) -> Resolved:
    """Read options from all sources, in the order of `sources.read_all`. Errors, warnings and notes go to `problems`.

    An option whose value is not valid is left at its default. `properties` are what DJL Serving passes, None outside
    it; `file` replaces the `serving.properties` in `model_dir`, and is read unless its `content` is given; `overrides`
    are options of the command line, or of `overrides_from`. `embedded`: the embedded server serves the model, or it is
    compiled, so that warnings about DJL Serving are left out, as they are of settings that were not written for it.
    """
    if model_dir is None and properties and properties.get("model_dir"):
        model_dir = Path(str(properties["model_dir"]))
    in_file = read_file(model_dir, file, content, problems)
    inputs = Inputs(environ, model_dir, properties, in_file, overrides, overrides_from)
    inputs, written = _read_written(inputs, problems)
    folder = model_dir or (Path(file).parent if file else Path())
    every = keywords.translated(sources.read_all(inputs, written), folder)
    named = [one for one in every if NAMES.get(one.name) in {"model_id", "model_dir"}]
    reader = _Reader(problems, {Path(str(one.value)).absolute() for one in named})
    for setting in every:
        reader.read(setting)
    options = reader.validate(folder)
    origins = {
        name: setting.origin
        for name, setting in reader.chosen.items()
        if name not in reader.refused
    }
    workers = sources.worker_variables(written)
    refused = sources.misplaced(workers)
    workers = {name: setting for name, setting in workers.items() if name not in refused}
    in_override = [one for one in reader.chosen.values() if one.source == keywords.OVERRIDE]
    handed_over = djl_serving.handed_over(inputs, written, options)
    planned = options.model_copy(update=handed_over)
    is_signed = djl_serving.is_for_djl(written) and not embedded
    written_for_djl = properties is not None or is_signed
    about_djl = [
        finding
        for finding in djl_serving.findings(inputs, written, options, planned, in_override)
        if written_for_djl or finding.level == "error"
    ]
    options = planned
    place = {name: f", in place of {_written(reader.chosen[name])}" for name in origins}
    origins.update({name: f"{sources.DJL}{place.get(name, '')}" for name in handed_over})
    # A name with a warning about it is not listed as ignored too.
    warned = {finding.names[0] for finding in reader.findings if finding.level == "warning"}
    if any("entryPoint" in finding.names for finding in about_djl):
        warned.add("entryPoint")
    ignored = {name: why for name, why in reader.ignored.items() if name not in warned}
    for_djl = sources.for_djl(written)
    resolved = Resolved(
        options, origins, ignored, reader.refused, workers, for_djl, written_for_djl
    )
    unused = [
        Finding((name,), option(name).unused, "note")
        for name in sorted(_UNUSED)
        if getattr(options, name) is not None
    ]
    for setting in {entry.name: entry for entry in reversed(written)}.values():
        ours = str(setting.value).startswith(djl_serving.NO_HANDLERS)
        runs = setting.name in _RUNS and not ours and truth(setting.value) is not False
        stranger = properties is None and not setting.by_operator
        if stranger and runs:
            problem = "a start may run its author's code; remove it unless you trust the author"
            problems.add("warning", f"option.{_written(setting)}: {problem}", (setting.name,))
        if stranger and setting.name in _WRITTEN and PLACE.search(str(setting.value)):
            problem = "compiled graphs are read and written there; remove it unless you trust who wrote the file"
            problems.add("note", f"option.{_written(setting)}: {problem}", (setting.name,))
        parts = str(setting.value).rstrip(",").split(",")  # not quoted: one may be a secret
        if setting.name == "env" and not all("=" in part for part in parts):
            problem = f"option.env ({setting.origin}): a part has no =; expected A=1,B=2"
            problems.add("warning", problem)
    foreign = [
        Finding((), f"environment {variable}: no effect here; {advice}", "warning")
        for variable in sorted(environ)
        if (advice := unread(variable))
    ]
    own = own_code.findings(options) if properties is None else ()
    resolved.report([*about_djl, *unused, *reader.findings, *own, *foreign], problems)
    return resolved


def _read_written(inputs: Inputs, problems: Problems) -> tuple[Inputs, list[Setting]]:
    """Return the inputs without refused variables of `option.env`, and the settings that users have written there."""
    written = sources.read_written(inputs)
    variables = sources.worker_variables(written)
    names = sources.misplaced(variables)
    if inputs.properties is not None or djl_serving.is_for_djl(written):
        # DJL Serving starts as many processes.
        written = [one for one in written if not one.origin.endswith(sources.WORKERS)]
    if not names:
        return inputs, written
    fix = listed(dict.fromkeys(f"option.{name}=…" for name in names.values()))
    message = (
        f"option.env ({variables[next(iter(names))].origin}) sets {listed(names)}: only the server's environment may "
        f"set options so; write {fix} instead"
    )
    problems.add_error(ConfigError(message))
    if inputs.properties is not None:
        operators = {name: value for name, value in inputs.environ.items() if name not in names}
        inputs = replace(inputs, environ=operators)
    return inputs, sources.read_written(inputs)


def read_file(
    model_dir: Path | None, file: str | None, content: bytes | None, problems: Problems
) -> list[Setting]:
    """Read the settings of the file alone; see `read_settings`."""
    try:
        if file is not None and content is not None:
            return [_remote(one, file) for one in sources.parse_properties(content, file)]
        if file is not None:
            return sources.from_properties(Path(file))
        return [] if model_dir is None else sources.from_file(model_dir)
    except ConfigError as error:
        problems.add_error(error)
        return []


def _remote(setting: Setting, file: str) -> Setting:
    """A setting of a file elsewhere: a relative place of graphs is in that file's folder, as with a file here."""
    value = str(setting.value).strip()
    is_absolute = value.startswith(("/", "~")) or "://" in value
    if NAMES.get(setting.name) not in _WRITTEN or not value or is_absolute:
        return setting
    return replace(setting, value=sources.inside(file.rpartition("/")[0], value))


class _Reader:
    """Reads settings, highest precedence first, and keeps the one that counts for each option."""

    def __init__(self, problems: Problems, models: Collection[Path]) -> None:
        self.chosen: dict[str, Setting] = {}
        """Option to the setting that counts."""
        self.ignored: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.findings: list[Finding] = []
        """Warnings and notes, which are described when all values are known."""
        self._overrides: list[Finding] = []
        self._problems = problems
        self._models = models
        """Names of the model, as absolute paths, which its tokenizer has too."""
        self._firsts: dict[tuple[str, str], Setting] = {}
        """Source and option to the first of its settings."""

    def read(self, setting: Setting) -> None:
        """Take one setting, of lower precedence than those before it."""
        name = NAMES.get(setting.name)
        about = (name or str(shortened(setting.name)),)
        self.findings += (Finding(about, text, level) for level, text in setting.remarks)
        if setting.unused:
            self.ignored[setting.name] = setting.unused
        elif name is not None:
            self._choose(name, setting)
        else:
            self._unknown(setting)

    def validate(self, folder: Path) -> ServingOptions:
        """The options; one that is not valid becomes an error and stays at its default. Files are in `folder`."""
        values: dict[str, object] = {}
        wrong: dict[str, str] = {}
        for name, setting in self.chosen.items():
            try:
                values[name] = _content(setting, option(name), folder)
            except ConfigError as error:  # noqa: PERF203  (each is reported)
                wrong[name] = f"; {error}"
        try:
            options = ServingOptions.model_validate(values)
        except ValidationError as error:
            invalid = _reasons(error)
            wrong.update(invalid)
            options = ServingOptions.model_validate(
                {name: value for name, value in values.items() if name not in invalid}
            )
        for name, why in wrong.items():
            setting = self.chosen[name]
            words = allowed_values(name)
            advice = _advice(name, setting.value, partial(_allows, name), words)
            self._refuse(setting, words + why + advice)
            self.refused[name] = f"{shortened(setting.value)!r} ({setting.origin}) is not allowed"
        self.findings += (entry for entry in self._overrides if entry.names[0] not in wrong)
        for name, setting in self.chosen.items():
            if name not in wrong and reordered(setting.value, getattr(options, name)):
                self.findings.append(
                    Finding((name,), "taken in ascending order, each once", "note")
                )
        return options

    def _choose(self, name: str, setting: Setting) -> None:
        if name == "model_dir" and setting.by_user:
            self._refuse(
                setting, "nothing: it is set by the server; name a model with option.model_id"
            )
        if option(name).operator and not setting.by_operator:
            places = f"-o {name}=… or OPTION_{name.upper()}"
            self._refuse(setting, f"it in {places} only: a model folder cannot set it")
            return
        other = self._firsts.setdefault((setting.source, name), setting)
        winner = self.chosen.setdefault(name, setting)
        if (merged := _merged(name, winner, setting)) is not None:
            self.chosen[name] = merged
        elif _contradicts(name, other, setting):
            message = (
                f"{other.name}={shortened(other.value)!r} ({other.origin}) and "
                f"{setting.name}={shortened(setting.value)!r} ({setting.origin}) are two values of one option; keep one"
            )
            self._problems.add_error(IncompatibleOptionsError(message))
        elif _overridden(name, winner, setting):
            level: Level = "warning" if winner.source == keywords.OVERRIDE else "note"
            self._overrides.append(Finding((name,), f"overrides {_written(setting)}", level))

    def _unknown(self, setting: Setting) -> None:
        """Ignore, refuse or warn of a name that is not an option."""
        name, origin = str(shortened(setting.name)), setting.origin
        in_file = setting.source == sources.FILE_NAME
        if entry := UNSUPPORTED.get(name) or self._neutral(setting):
            self._unsupported(setting, entry)
        elif name in IGNORED:
            self.ignored[name] = IGNORED[name]
        elif name in DJL_ARGUMENTS and setting.by_user:
            expected = f"{name} without 'option.' in serving.properties, where DJL Serving reads it"
            self._refuse(setting, expected)
        elif setting.by_user:
            known = [*NAMES, *IGNORED, *UNSUPPORTED]
            hint = hints.unknown(name, setting.value, known)
            if not hint and name in keywords.RESERVED:
                hint = f": {keywords.RESERVED[name][1]}"
            self._problems.add_error(UnknownOptionError(name, origin, hint))
        elif not in_file or name in DJL_ARGUMENTS:
            self.ignored.setdefault(name, "a setting of DJL Serving")
        elif _misspells_prefix(setting):
            known = [f"option.{option_name}" for option_name in NAMES]
            hint = hints.unknown(name, setting.value, known)
            self._problems.add_error(UnknownOptionError(name, origin, hint))
        else:
            hint = hints.unknown(name, setting.value, [*NAMES, *DJL_ARGUMENTS])
            self._warn(
                name, f"{origin}: neither an option (option.<name>) nor a key of DJL Serving{hint}"
            )

    def _neutral(self, setting: Setting) -> Unsupported | None:
        """The entry of a flag of vLLM that has no option here; None for any other name."""
        if setting.name not in NEUTRAL or not setting.by_user:
            return None
        neutral = NEUTRAL[setting.name]
        if setting.name == "tokenizer" and Path(str(setting.value)).absolute() in self._models:
            neutral = (str(setting.value).lower(),)
        return Unsupported(neutral, hints.neutral(setting.name), "it asks for nothing here")

    def _unsupported(self, setting: Setting, entry: Unsupported) -> None:
        if entry.accepts(shortened(setting.value)):
            self.ignored[setting.name] = entry.off
        elif setting.by_user:
            self._refuse(setting, entry.expected)
        elif setting.source == sources.FILE_NAME:
            self._warn(setting.name, f"{setting.origin}: not supported in this version")
        else:
            self.ignored[setting.name] = "not supported in this version"

    def _refuse(self, setting: Setting, expected: str) -> None:
        self._problems.add_error(
            InvalidOptionError(setting.name, shortened(setting.value), setting.origin, expected)
        )

    def _warn(self, name: str, message: str) -> None:
        self.findings.append(Finding((name,), message, "warning"))


def _written(setting: Setting) -> str:
    return f"{setting.name}={shortened(setting.value)} ({setting.origin})"


def _content(setting: Setting, marker: Option, folder: Path) -> object:
    """The value, or the content of the file that it names. Raises ConfigError: see `sources.content`."""
    if not (marker.file or marker.text_file):
        return setting.value
    operator = setting.by_operator
    return sources.content(setting.value, folder, by_operator=operator, is_text=marker.text_file)


def _merged(name: str, winner: Setting, setting: Setting) -> Setting | None:
    """A length with the shorter ones that another server has for its graphs, as in keywords; else None."""
    for one, of_graphs in ((winner, setting), (setting, winner)):
        longest, lengths = parse_value(name, one.value), parse_value(name, of_graphs.value)
        if (
            name == "n_positions"
            and of_graphs.source == sources.OTHER_SERVERS
            and isinstance(longest, int)
            and isinstance(lengths, tuple)
            and lengths[-1] <= longest
        ):
            origin = f"{winner.origin}, {setting.origin}"
            return replace(winner, value=sorted({*lengths, longest}), origin=origin)
    return None


def _contradicts(name: str, one: Setting, two: Setting) -> bool:
    """True for two names, or keywords, of one option with two values in one source, both by the user.

    Spellings of one value agree; values that are not allowed are not compared.
    """
    same_name = one.name == two.name and one.source != keywords.OVERRIDE
    if same_name or not (one.by_user and two.by_user):
        return False
    values = [parse_value(name, one.value), parse_value(name, two.value)]
    return INVALID not in values and values[0] != values[1]


def _overridden(name: str, winner: Setting, setting: Setting) -> bool:
    """True if `winner` overrides another value unexpectedly; see `_REMARKED`.

    Buckets agree with the length that is their longest.
    """
    won, lost = parse_value(name, winner.value), parse_value(name, setting.value)
    return (
        winner.origin not in {setting.origin, sources.DJL}
        and (
            setting.source not in _REMARKED
            or winner.source not in {setting.source, sources.COMMAND_LINE}
        )
        and setting.by_user
        and won != lost
        and (not isinstance(won, tuple) or won[-1:] != (lost,))
    )


def _reasons(error: ValidationError) -> dict[str, str]:
    """The options that are not valid, each with what to add to its allowed values."""
    found: dict[str, str] = {}
    for entry in error.errors(include_url=False, include_context=False, include_input=False):
        name, *inner = map(str, entry["loc"])
        # Within an object, the key that is wrong. The message of a union's branch would only confuse.
        where = f"; {wrong_part(inner[0])}" if inner and option(name).file else ""
        if name in _EXPLAINED and entry["type"] == "value_error":
            where = f"; {entry['msg'].removeprefix('Value error, ')}"
        found.setdefault(name, where)
    return found


def _allows(name: str, value: object) -> bool:
    return parse_value(name, value) is not INVALID


def _advice(name: str, value: object, allowed: Callable[[str], bool], words: str) -> str:
    """Suggest a value that is `allowed`, in place of one that is not. `words`: the allowed values, as a text."""
    for other in _NEIGHBOURS.get(name, ()):
        if _allows(other, value):
            return f"; this is a value of {other}: write option.{other}={shortened(value)}"
    # Each word is allowed as a template, which any text is.
    near = [] if name in _TEMPLATES else filter(allowed, re.findall(r"[\w-]+", words))
    return hints.repair(value, allowed, is_name=name in _MODELS) or did_you_mean(str(value), near)


def _misspells_prefix(setting: Setting) -> bool:
    """True for a key that begins with a misspelt ``option.``, and for one that a blank cuts off from the option."""
    found = _PREFIX.match(setting.name[:MAX_SHOWN].lower())
    head = found[1] if found else ""
    cut_off = str(setting.value).lower().startswith(("option.", "option_"))
    return cut_off or head == "opt" or bool(get_close_matches(head, ["option"], cutoff=0.7))
