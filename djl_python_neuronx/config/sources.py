"""Sources of settings: command line, SageMaker, `serving.properties`, the environment, DJL Serving.

A source yields `Setting`s with their origin; `WRITTEN` is their precedence. `resolve` validates the values.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import javaproperties

from djl_python_neuronx import links
from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.legacy import DJL_OPTIONS
from djl_python_neuronx.config.options import INVALID, NAMES, ServingOptions, option, parse_value
from djl_python_neuronx.config.other_servers import ADVICE, SAME, SPECULATION
from djl_python_neuronx.config.values import make_buckets, parse_object, shortened
from djl_python_neuronx.errors import ArtifactError, ConfigError

FILE_NAME = "serving.properties"
MODEL_DIR = Path("/opt/ml/model")
"""Default model folder: SageMaker's."""
DJL = "DJL"
"""Source of everything that DJL Serving passes, and origin of what it adds itself."""
COMMAND_LINE, ENVIRONMENT, HUB_SOURCE = "command line", "environment", "hub"
OTHER_SERVERS = "other servers"
"""Source of the variables of other servers' images, which DJL Serving does not read."""
API_KEYS = "DJL_NEURONX_API_KEY"
"""Variable with API keys of the embedded server, separated by commas."""
LOG_FORMAT = "DJL_NEURONX_LOG_FORMAT"
"""Variable with the format of the log: `text` or `json`."""
_ENV_PREFIX, _ARGUMENT_PREFIX = "OPTION_", "ARGS_"
_FLAG_PREFIXES = ("SM_VLLM_", "SM_ON_")
_UNUSED_FLAGS = {"host", "port"}
"""Flags whose variables in an image are listed as ignored: without them the endpoint does the same."""
PREFIXES: Final = (_ENV_PREFIX, _ARGUMENT_PREFIX, *_FLAG_PREFIXES)
"""Prefixes of variables that set an option, whose name follows. The last ones are for flags of ``vllm serve`` and of
``optimum-cli neuron serve``. Source: vLLM 0.16, sagemaker-entrypoint.sh; optimum-neuron 213224e, docker/vllm."""

SAGEMAKER: Final[Mapping[str, str]] = {
    "SAGEMAKER_STARTUP_TIMEOUT": "model_loading_timeout",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "predict_timeout",
    "SAGEMAKER_MAX_REQUEST_SIZE": "max_body_bytes",
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": "max_body_bytes",
    "SAGEMAKER_NUM_MODEL_WORKERS": "replicas",
}
"""Variables that override the file, to the option. Source: djl-serving d21927c, SageMakerCompatibility.java; the two of
`max_body_bytes`: serving/docs/sklearn_handler.md."""
WORKERS: Final = "SAGEMAKER_NUM_MODEL_WORKERS"
"""Variable with the processes of a model, which DJL Serving starts itself."""
_MEBIBYTES = "SAGEMAKER_MAX_PAYLOAD_IN_MB"

HUB: Final[Mapping[str, str]] = {
    "HF_MODEL_ID": "model_id",
    "HF_REVISION": "revision",
    "HF_MODEL_REVISION": "revision",
    "HF_TASK": "task",
}
"""Variables that together name a model of the hub, to the option. They precede `OPTION_*` because DJL Serving writes a
`serving.properties` with them. Source: djl-serving d21927c, ModelStore.java; `HF_MODEL_REVISION` is TGI's:
text-generation-inference db931fc, sagemaker-entrypoint.sh."""
TGI_MODEL: Final[Mapping[str, str]] = {"MODEL_ID": "model_id", "REVISION": "revision"}
"""TGI's variables that together name a model, to the option. Source: text-generation-inference db931fc, main.rs."""

_GPUS = "SM_NUM_GPUS"
TGI: Final[Mapping[str, str]] = {
    "HF_MODEL_QUANTIZE": "quantize",
    "HF_MODEL_TRUST_REMOTE_CODE": "trust_remote_code",
    "MAX_BATCH_SIZE": "max_rolling_batch_size",
    "MAX_BATCH_PREFILL_TOKENS": "max_rolling_batch_prefill_tokens",
    "MAX_CONCURRENT_REQUESTS": "max_waiting",
    _GPUS: "tensor_parallel_degree",
}
"""Variables of TGI, to the option. Source: djl-serving d21927c,
dockerd-entrypoint-with-cuda-compat.sh, which turns them into `OPTION_*` (the requests that may wait into the length of
DJL's own queue, the GPUs into `TENSOR_PARALLEL_DEGREE`) where those are not set."""

_HUB_OF: Final = {name: variable for variable, name in reversed([*HUB.items()])}
_OWN: Final = {
    variable: name for name in ServingOptions.model_fields for variable in option(name).env
}
"""Variables of single options."""
_FALLBACKS: Final = {
    **{name: known for name, known in {**TGI, **_OWN}.items() if name not in {*HUB, _GPUS}},
    _GPUS: TGI[_GPUS],  # TENSOR_PARALLEL_DEGREE counts before it
}
_OTHERS: Final = {variable: name for variable, name in SAME.items() if variable.isupper()}
OPTION_VARIABLES: Final = {**SAGEMAKER, **HUB, **_FALLBACKS, **TGI_MODEL, **_OTHERS}
"""Variables that set options under their own name, to the option. Of several for one option the first counts."""

# Source: djl-serving d21927c, ModelInfo.java: names are lower-cased, and only if they are upper-case throughout.
_ENV_SPECIAL = {"entrypoint": "entryPoint"}
_UPPER = re.compile(r"[A-Z_\d]+")
_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_LENGTH = re.compile(r"(\d{1,9}(?:\.\d{1,9}(?=[km]))?)([kKmM])")

_FILE_PREFIX = "option."
_JAVA_BLANKS = "".join(map(chr, range(0x21)))
MAX_FILE_BYTES, MAX_LINES = 1 << 20, 2_000
_MAX_PATH = 4096  # Linux's own limit
_NO_PATHS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "none", "null"})
_MARK = (
    "begins with a byte order mark, which DJL Serving reads as part of the key, so it ignores this setting. "
    "Save the file without the mark"
)
_LOST = re.compile(r"(?<!\\)(?:\\\\)*(\\[a-eg-mo-qsv-zA-Z0-9])")
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Setting:
    """One value and where it comes from."""

    name: str
    """As written, without prefix."""
    value: object
    origin: str
    """For messages: a line of a file, a variable, the command line."""
    source: str
    """Kind of origin. Two settings of one source contradict each other, those of two sources override each other."""
    by_user: bool
    """The user addressed it to this server (`option.*`, `OPTION_*`, command line): an unknown name is an error."""
    remarks: Sequence[tuple[Level, str]] = ()
    """Warnings and notes about the way it is written."""
    unused: str = ""
    """The reason that it has no effect; empty if it has one."""

    @property
    def by_operator(self) -> bool:
        """True if the operator of the server set it, not the author of the model folder."""
        return self.origin.startswith(("environment ", COMMAND_LINE))


@dataclass(frozen=True)
class Inputs:
    """Everything that settings are read from."""

    environ: Mapping[str, str]
    model_dir: Path | None = None
    properties: Mapping[str, object] | None = None
    """Properties that DJL Serving passes to the handler; None outside DJL Serving."""
    file: Sequence[Setting] = ()
    """Settings of the `serving.properties`."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    overrides_from: str = COMMAND_LINE


Source: TypeAlias = Callable[[Inputs, Sequence[Setting]], Sequence[Setting]]
"""Settings of one source, given those of the sources with higher precedence."""


def environment() -> dict[str, str]:
    """A copy of the process environment. All other code gets the variables as an argument."""
    return dict(os.environ)


def taken(variable: str) -> str | None:
    """The value of a variable with a secret, which is removed: processes that are started later do not get it."""
    return os.environ.pop(variable, None)


def without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that set options, for a second model in the process."""
    return {
        name: value
        for name, value in environ.items()
        if name not in OPTION_VARIABLES and not name.startswith(PREFIXES)
    }


def from_overrides(inputs: Inputs, _stronger: Sequence[Setting]) -> list[Setting]:
    """Options of the command line, or of `overrides_from`."""
    return [
        Setting(name, value, inputs.overrides_from, COMMAND_LINE, by_user=True)
        for name, value in inputs.overrides.items()
    ]


def from_sagemaker(inputs: Inputs, _stronger: Sequence[Setting]) -> list[Setting]:
    """SageMaker's own variables that set options. DJL Serving reads the others."""
    environ = dict(inputs.environ)
    if (mebibytes := environ.get(_MEBIBYTES, "").strip()).isdecimal():
        environ[_MEBIBYTES] = str(int(mebibytes[:10]) << 20 or 2**31 - 1)  # 0: no limit
    return _from_variables(environ, SAGEMAKER, "SageMaker")


def from_file_options(inputs: Inputs, _stronger: Sequence[Setting]) -> list[Setting]:
    """``option.*`` in `serving.properties`; the variables are the origin if DJL Serving wrote the file from them."""
    settings = [setting for setting in inputs.file if setting.by_user]
    if not written_by_djl(inputs):
        return settings
    return [
        replace(setting, origin=f"environment {_HUB_OF[setting.name]}", source=HUB_SOURCE)
        for setting in settings
    ]


def from_hub(inputs: Inputs, stronger: Sequence[Setting]) -> list[Setting]:
    """The variables that name a model of the hub."""
    return [] if written_by_djl(inputs) else _naming_a_model(inputs, stronger, HUB, HUB_SOURCE)


def _naming_a_model(
    inputs: Inputs, stronger: Sequence[Setting], names: Mapping[str, str], source: str
) -> list[Setting]:
    """The variables in `names`, the first of which names a model.

    Revision and task belong to the model they are set with: if something else names the model, they have no effect.
    """
    model = next(iter(names))
    given = {
        name: value for name, value in inputs.environ.items() if name in names and value.strip()
    }
    if _is_place(given.get(model)):
        stronger = [*stronger, *stripped(from_option_variables(inputs, ()))]
    named = next((entry.origin for entry in stronger if entry.name == "model_id"), None)
    if model not in given:
        reason = (
            f"it belongs to {model}, which is not set; otherwise use OPTION_REVISION or OPTION_TASK"
        )
    elif inputs.properties is not None:
        reason = "DJL Serving names the model; for HF_MODEL_ID it creates a separate model folder"
    elif held := _held(inputs):
        reason = held
    elif named is not None:
        reason = f"the model is named by {named}"
    else:
        return _from_variables(given, names, source)
    return [
        Setting(name, value, f"environment {name}", source, by_user=True, unused=reason)
        for name, value in given.items()
    ]


def _held(inputs: Inputs) -> str:
    """The reason that the model folder's own model is served; empty if it holds none."""
    folder = inputs.model_dir
    if folder and try_path((folder / "config.json").exists, failed=False):
        return f"{folder} holds a model"
    return ""


def _is_place(model: str | None) -> bool:
    """True for a folder or URI, beside which DJL Serving takes the model of ``OPTION_MODEL_ID``.

    Source: djl-serving d21927c, ModelStore.java createHuggingFaceModel.
    """
    uri = model and model.startswith(("s3://", "djl://"))
    return bool(uri or (model and try_path(Path(model).exists, failed=False)))


def from_option_variables(inputs: Inputs, _stronger: Sequence[Setting]) -> list[Setting]:
    """``OPTION_*`` variables, named as DJL Serving names them."""
    return _from_prefix(inputs.environ, _ENV_PREFIX, by_user=True)


def from_file_arguments(inputs: Inputs, _stronger: Sequence[Setting]) -> list[Setting]:
    """Keys of `serving.properties` without prefix: arguments of DJL Serving, which passes them to the handler too."""
    return [setting for setting in inputs.file if not setting.by_user]


def from_argument_variables(inputs: Inputs, _stronger: Sequence[Setting]) -> list[Setting]:
    """``ARGS_*`` variables: the same arguments of DJL Serving."""
    return _from_prefix(inputs.environ, _ARGUMENT_PREFIX, by_user=False)


def from_fallbacks(inputs: Inputs, stronger: Sequence[Setting]) -> list[Setting]:
    """Variables of TGI's users, then variables of single options such as ``TENSOR_PARALLEL_DEGREE``.

    Those of ``option.env`` are added, which DJL Serving sets for its Python process.
    """
    own = worker_variables(stronger)
    environ = with_worker_variables(inputs.environ, own)
    return _from_variables(environ, _FALLBACKS, "fallbacks", own)


def from_other_servers(inputs: Inputs, stronger: Sequence[Setting]) -> list[Setting]:
    """Variables of other servers' images that mean the same as an option."""
    own = worker_variables(stronger)
    environ = with_worker_variables(inputs.environ, own)
    names = {variable: variable for variable in _OTHERS}
    found = _from_variables(environ, names, OTHER_SERVERS, own)
    for prefix in _FLAG_PREFIXES:
        for flag in _from_prefix(inputs.environ, prefix, by_user=True):
            unused = ADVICE[flag.name] if flag.name in _UNUSED_FLAGS else ""
            if NAMES.get(SAME.get(flag.name, flag.name)) == "model_id":
                unused = _held(inputs)
            value = flag.value or "true"
            found.append(replace(flag, value=value, source=OTHER_SERVERS, unused=unused))
    found = [
        replace(setting, name=name, value=value)
        for setting in found
        for name, value in meant(setting.name, setting.value)
    ]
    return [*_naming_a_model(inputs, stronger, TGI_MODEL, OTHER_SERVERS), *found]


def meant(name: str, value: object) -> list[tuple[str, object]]:
    """The options that another server's name stands for, with their values: of a longest prompt the lengths up to it.

    Lengths may have vLLM's units: 2k is 2000, 2K is 2048. Source: vLLM 0.16, arg_utils.py human_readable_int.
    """
    if name == "speculative_config":
        return _speculation(str(value))
    unit = _LENGTH.fullmatch(str(value).strip()) if name == "max_model_len" else None
    if unit and float(unit[1]) * _UNITS[unit[2]] < 2**31:
        value = str(int(float(unit[1]) * _UNITS[unit[2]]))
    longest = parse_value("n_positions", value) if name.lower().startswith("max_input_") else None
    return [(SAME.get(name, name), make_buckets(longest) if isinstance(longest, int) else value)]


def _speculation(text: str) -> list[tuple[str, object]]:
    """The options of vLLM's object; a key without an option stays a name that is unknown here.

    Both models have the same lengths, so that `max_model_len`, which AWS's guides set, says nothing.
    """
    given = None
    with suppress(ValueError):
        given = parse_object(text)
    if not isinstance(given, dict):
        return [("speculative_config", text)]
    if given.get("method") == "ngram":
        given = {"prompt_lookup_max": 5, **given, "method": None}  # vLLM's default
    given.pop("max_model_len", None)
    return [(SPECULATION.get(key, f"speculative_config[{key}]"), given[key]) for key in given]


WRITTEN: Final[tuple[Source, ...]] = (
    from_overrides,
    from_sagemaker,
    from_file_options,
    from_hub,
    from_option_variables,
    from_file_arguments,
    from_argument_variables,
    from_fallbacks,
    from_other_servers,
)
"""Sources of what users write, highest precedence first."""


def read_written(inputs: Inputs) -> list[Setting]:
    """The settings of all `WRITTEN` sources, highest precedence first."""
    found: list[Setting] = []
    for source in WRITTEN:
        found += stripped(source(inputs, found))
    return found


def read_all(inputs: Inputs, written: Sequence[Setting]) -> list[Setting]:
    """Every setting, highest precedence first: the model folder, what DJL Serving passes, what users have `written`.

    DJL Serving passes what users wrote, changed or not: it has the last word.
    """
    folder: list[Setting] = []
    if inputs.model_dir is not None:
        folder = [Setting("model_dir", inputs.model_dir, "the model folder", "argument", False)]
    return [*folder, *from_djl(inputs.properties or {}, written), *written]


def stripped(settings: Iterable[Setting]) -> Iterator[Setting]:
    """The settings without blanks around their values, which Java keeps, and without empty values."""
    for setting in settings:
        value = setting.value.strip() if isinstance(setting.value, str) else setting.value
        if value is not None and value != "":
            yield replace(setting, value=value)


def from_djl(properties: Mapping[str, object], written: Sequence[Setting]) -> list[Setting]:
    """Read what DJL Serving passes: settings of the user, changed or not, mixed with its own keys.

    The prefix is gone by then, so a value has the origin of the setting in `written` that it equals. The order is that
    of `written`, not that of Java's hash map: of two names for one option the user's first one counts.
    """
    # Functions of `model.py` are no settings.
    properties = {name: value for name, value in properties.items() if not callable(value)}
    firsts: dict[str, Setting] = {}
    for setting in written:
        firsts.setdefault(setting.name, setting)
    all_cores = any(
        NAMES.get(setting.name) == "tensor_parallel_degree" and str(setting.value).lower() == "max"
        for setting in written
    )
    names = [name for name in firsts if name in properties] + sorted(properties.keys() - firsts)
    settings = stripped(
        Setting(
            name,
            properties[name],
            _origin(written, firsts.get(name), name, properties[name]),
            DJL,
            by_user=False,
        )
        for name in names
    )
    return [replace(setting, unused=_unused(setting, all_cores=all_cores)) for setting in settings]


def written_by_djl(inputs: Inputs) -> bool:
    """True for the file that DJL Serving writes for a hub model: it holds the `HUB` variables and nothing else."""
    return any(setting.name == "model_id" for setting in inputs.file) and all(
        setting.by_user
        and setting.name in _HUB_OF
        and inputs.environ.get(_HUB_OF[setting.name]) == setting.value
        for setting in inputs.file
    )


def for_djl(written: Sequence[Setting]) -> dict[str, str]:
    """The keys of `serving.properties`, as written there, for DJL Serving itself. Not `option.env`, and no options."""
    found: dict[str, str] = {}
    for setting in written:
        if (not setting.by_user and setting.name not in NAMES) or setting.name in DJL_OPTIONS:
            key = f"{_FILE_PREFIX if setting.by_user else ''}{setting.name}"
            found.setdefault(key, str(setting.value))
    return found


def worker_variables(written: Sequence[Setting]) -> dict[str, Setting]:
    """The variables that DJL Serving sets for its Python process because of `option.env`; they may be secrets.

    Source: djl-serving d21927c, PyModel.java: split at commas, then at the first equals sign; java.lang.ProcessBuilder
    drops what follows a NUL, and writes a question mark for half a character.
    """
    setting = next((entry for entry in written if entry.name == "env" and entry.by_user), None)
    if setting is None:
        return {}
    text = str(setting.value).encode(errors="replace").decode()
    parts = (part.partition("\0")[0] for part in text.split(","))
    pairs = (part.partition("=") for part in parts)
    return {
        name: replace(setting, name=name, value=value.strip(_JAVA_BLANKS))
        for name, sign, value in ((n.strip(_JAVA_BLANKS), s, v) for n, s, v in pairs)
        if sign
    }


def misplaced(variables: Mapping[str, Setting]) -> dict[str, str]:
    """Variables of `option.env` that set options in the server's environment only, to the option.

    DJL Serving's process has them too, where they are not the operator's.
    """
    options = {**SAGEMAKER, **HUB, **TGI_MODEL}
    for prefix in PREFIXES:
        found = (name for name in variables if name.startswith(prefix))
        options |= {name: name.removeprefix(prefix).lower() for name in found}
    return {name: options[name] for name in variables if name in options}


def with_worker_variables(
    environ: Mapping[str, str], variables: Mapping[str, Setting]
) -> dict[str, str]:
    """The environment of the handler under DJL Serving: `environ` overlaid with the variables of `option.env`."""
    return {**environ, **{name: str(setting.value) for name, setting in variables.items()}}


def _from_variables(
    environ: Mapping[str, str],
    names: Mapping[str, str],
    source: str,
    own: Mapping[str, Setting] = MappingProxyType({}),
) -> list[Setting]:
    """A setting for each variable in `names` that is set, in that order; `own` are those that `option.env` sets."""
    origins = {variable: f"environment {variable}" for variable in environ}
    origins |= {variable: f"{setting.origin}, {variable}" for variable, setting in own.items()}
    return [
        Setting(name, environ[variable], origins[variable], source, by_user=True)
        for variable, name in names.items()
        if variable in environ
    ]


def _from_prefix(environ: Mapping[str, str], prefix: str, *, by_user: bool) -> list[Setting]:
    """A setting for each variable with the prefix. Of two spellings of one name the first counts."""
    found: dict[str, Setting] = {}
    settings = []
    for variable, value in environ.items():
        name = variable.removeprefix(prefix)
        if name in {variable, ""}:
            continue
        name = name.lower() if _UPPER.fullmatch(name) else name
        name = _ENV_SPECIAL.get(name, name)
        setting = Setting(name, value, f"environment {variable}", ENVIRONMENT, by_user)
        earlier = found.setdefault(name, setting)
        if value.strip() not in {"", earlier.value}:
            note = f"{setting.origin} is another spelling of {earlier.origin}, which counts"
            setting = replace(setting, remarks=(("note", note),))
        settings.append(setting)
    return settings


def _origin(written: Sequence[Setting], first: Setting | None, name: str, value: object) -> str:
    """The origin of a value that DJL Serving passes: the user's, or DJL Serving itself."""
    if not isinstance(value, str):
        return DJL
    value = value.strip()
    if first is not None and str(first.value).startswith("s3://") and value != first.value:
        # Source: djl-serving d21927c, ModelInfo.java downloadS3, downloadDraftModel.
        return f"{first.origin}, downloaded by DJL"
    same = (entry.origin for entry in written if (entry.name, entry.value) == (name, value))
    return next(same, DJL)


def _unused(setting: Setting, *, all_cores: bool) -> str:
    """The reason why a setting passed by DJL Serving has no effect; empty if it has one.

    `all_cores`: the user set the tensor parallel degree to `max`, which DJL Serving replaces by a number.
    """
    name, value = NAMES.get(setting.name), setting.value
    if name is None or setting.origin != DJL:
        return ""
    if parse_value(name, value) is INVALID:
        return f"DJL Serving's own value {shortened(value)!r} is not allowed here"
    counted = name == "tensor_parallel_degree" and all_cores
    if counted or str(value).strip() in option(name).djl.fills_in:
        return f"DJL Serving's default {value} is replaced by a value derived from the model and the cores"
    return ""


def try_path(test: Callable[[], bool], *, failed: bool) -> bool:
    """The result of `Path.exists` or `Path.is_file`, or `failed` where testing raises an error (no permission)."""
    try:
        return test()
    except (OSError, ValueError):
        return failed


def from_file(model_dir: Path) -> list[Setting]:
    """Read the `serving.properties` of a folder with `from_properties`. Returns no settings if there is no file.

    Raises:
        ConfigError: the file cannot be read, is a link out of the folder (see `links`) or holds a broken escape.
    """
    path = model_dir / FILE_NAME
    return from_properties(path, model_dir) if try_path(path.exists, failed=True) else []


def from_properties(path: Path, model_dir: Path | None = None) -> list[Setting]:
    """Read a properties file, of the model folder `model_dir` if that is given. See `parse_properties`.

    Raises:
        ConfigError: it cannot be read; see also `parse_properties`.
    """
    return parse_properties(_read_file(path, model_dir), str(path))


def parse_properties(content: bytes, path: str) -> list[Setting]:
    """Read the content of a properties file as Java's `Properties.load` does. Settings with `option.` come first.

    `path`: for messages.

    The encoding is ISO-8859-1 with escapes; the last of equal keys counts. Keys without the prefix are arguments of DJL
    Serving, which passes them to the handler too (`batch_size`, `engine`, `minWorkers` …). The byte order mark of
    Windows editors is skipped.

    Raises:
        ConfigError: it is larger than 1 MiB, has more than 2,000 lines or holds a broken escape.
    """
    _check_size(content, path)
    marked = content.startswith(codecs.BOM_UTF8)
    found: dict[str, Setting] = {}
    line = 1
    for entry in _entries(content.removeprefix(codecs.BOM_UTF8), path):
        if isinstance(entry, javaproperties.KeyValue):
            by_user = entry.key.startswith(_FILE_PREFIX)
            name, origin = entry.key.removeprefix(_FILE_PREFIX), f"{path} line {line}"
            remarks: list[tuple[Level, str]] = []
            if marked and line == 1:
                remarks.append(("warning", f"{origin} {_MARK}"))
            if by_user:
                remarks += _doubts(entry.source, entry.value)
            if entry.key in found:
                note = f"also set in {found[entry.key].origin}, which line {line} overrides"
                remarks.append(("note", note))
            found[entry.key] = Setting(name, entry.value, origin, FILE_NAME, by_user, remarks)
        line += len(_LINE_END.findall(entry.source))
    if "max_dynamic_batch_size" in found:
        # Source: djl-serving d21927c, ModelInfo.java configPerModelSettings: it is passed on under this name.
        late = found["max_dynamic_batch_size"]
        found.setdefault("batch_size", replace(late, name="batch_size", source=late.name))
    return sorted(found.values(), key=lambda setting: not setting.by_user)


def inside(folder: str, path: str) -> str:
    """The URI of a path relative to a folder that a URI names, whose own name may have empty parts."""
    scheme, _, place = folder.rstrip("/").partition("://")
    for part in path.split("/"):
        if part == "..":
            place = place.rpartition("/")[0]
        elif part not in {"", "."}:
            place = f"{place}/{part}"
    return f"{scheme}://{place}"


def _entries(content: bytes, path: str) -> Iterator[javaproperties.PropertiesElement]:
    """The parts of a properties file.

    Raises:
        ConfigError: it is another kind of file, or holds a broken escape.
    """
    kind = "UTF-16 or binary: save it as UTF-8" if b"\0" in content else ""
    if content.lstrip()[:1] in {b"{", b"<"}:
        kind = "JSON or XML: write a line option.NAME=VALUE for each option"
    if kind:
        message = f"{path!r} is not a properties file but {kind}"
        raise ConfigError(message)
    line = 1
    try:
        for entry in javaproperties.parse(io.BytesIO(content)):
            yield entry
            line += len(_LINE_END.findall(entry.source))
    except ValueError as error:
        fix = r"Write / or \\ for a backslash, \uXXXX for a character"
        message = f"{path!r} is not a properties file: line {line}: {error}. {fix}"
        raise ConfigError(message) from error


def _doubts(source: str, value: str) -> Iterator[tuple[Level, str]]:
    """Findings where Java reads a value differently than its writer probably meant."""
    if lost := _LOST.search(source):
        yield "error", f"Java drops the backslash of {lost[1]}; write / or \\\\ in a path"
    with suppress(UnicodeError):
        if (meant := value.encode("iso-8859-1").decode()) != value:
            fix = javaproperties.escape(str(shortened(meant)))
            yield "warning", f"Java reads the file as ISO-8859-1, not UTF-8; write {fix}"


def _read_file(path: Path, model_dir: Path | None) -> bytes:
    named = repr(str(path))
    try:
        real = path if model_dir else path.resolve(strict=True)
        with links.opened(real, model_dir or real.parent) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except ArtifactError as error:
        raise ConfigError(str(error)) from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{named} cannot be read: {reason}. Make it a readable file, or remove it"
        raise ConfigError(message) from error
    _check_size(content, str(path))
    return content


def _check_size(content: bytes, path: str) -> None:
    # javaproperties takes quadratic time for a line that goes on in the next ones. A setting may become a message.
    if len(content) > MAX_FILE_BYTES or len(content.splitlines()) > MAX_LINES:
        message = f"{path!r} has more than {MAX_FILE_BYTES} bytes or {MAX_LINES} lines, too many for settings"
        raise ConfigError(message)


def content(
    value: object, folder: Path, *, by_operator: bool = True, is_text: bool = False
) -> object:
    """Read the JSON file that `value` names, absolute or relative to `folder`. Returns `value` itself if it is no path.

    Any text is a path, except a number, words for yes, no or none, and text that begins like an object or a list. Only
    the operator may name a file outside the model folder: its content becomes an option, is logged and goes into
    outputs.

    `is_text`: the file is not JSON, and any text is a path but a Jinja template.

    Raises:
        ConfigError: the file cannot be read, is elsewhere, has more than 1 MiB or 2,000 lines, or is not JSON
            (text: not UTF-8).
    """
    if not isinstance(value, str) or value.lower() in _NO_PATHS:
        return value
    if ("{{" in value or "{%" in value) if is_text else _is_json(value):
        return value
    if len(value) > _MAX_PATH:
        message = f"a path has at most {_MAX_PATH} characters"
        raise ConfigError(message)
    path = folder / value
    if not try_path(path.exists, failed=True):
        message = f"there is no file {str(path)!r}"
        raise ConfigError(message)
    is_link = try_path(path.is_symlink, failed=False)
    if not (by_operator or is_link or path.resolve().is_relative_to(folder.resolve())):
        message = (
            f"{str(path)!r} is outside the model's folder: only the command line and the environment may name such "
            "a file"
        )
        raise ConfigError(message)
    text = _read_file(path, None if by_operator else folder)
    try:
        return text.decode("utf-8-sig") if is_text else json.loads(text)
    except (ValueError, RecursionError) as error:
        expected = "UTF-8" if is_text else "JSON"
        message = f"the file {str(path)!r} is not {expected}: {error}"
        raise ConfigError(message) from error


def _is_json(text: str) -> bool:
    """True for text that begins like an object or a list, and for a number."""
    with suppress(ValueError):
        return isfinite(float(text))
    return text[:1] in {"{", "[", "("}
