"""Where values come from: command line, SageMaker, `serving.properties`, the environment, DJL Serving.

Nothing is interpreted here but names: a source gives `Setting`s, `resolve` decides. What a user wrote is marked,
because only that is ours to refuse.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import javaproperties

from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.errors import ConfigError

FILE_NAME = "serving.properties"
MODEL_DIR = Path("/opt/ml/model")
"""Where the model lies unless another folder is named: SageMaker's."""
DJL = "DJL"
"""Source, and origin, of what DJL Serving passes; a value that the user wrote has the user's origin."""
COMMAND_LINE, ENVIRONMENT, HUB_SOURCE = "command line", "environment", "hub"
_ENV_PREFIX, _ARGUMENT_PREFIX = "OPTION_", "ARGS_"

SAGEMAKER: Mapping[str, str] = MappingProxyType(
    {
        "SAGEMAKER_STARTUP_TIMEOUT": "model_loading_timeout",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "predict_timeout",
    }
)
"""Variables that overrule the file, to the option. Source: djl-serving d21927c, SageMakerCompatibility.java."""

HUB: Mapping[str, str] = MappingProxyType(
    {"HF_MODEL_ID": "model_id", "HF_REVISION": "revision", "HF_TASK": "task"}
)
"""Variables that describe one model of the hub together, to the option. Source: djl-serving d21927c, ModelStore.java:
DJL Serving writes a `serving.properties` with them, so they come before `OPTION_*`."""

TGI: Mapping[str, str] = MappingProxyType(
    {
        "HF_MODEL_QUANTIZE": "quantize",
        "HF_MODEL_TRUST_REMOTE_CODE": "trust_remote_code",
        "MAX_BATCH_SIZE": "max_rolling_batch_size",
        "MAX_BATCH_PREFILL_TOKENS": "max_rolling_batch_prefill_tokens",
        "MAX_CONCURRENT_REQUESTS": "max_waiting",
        "SM_NUM_GPUS": "tensor_parallel_degree",
    }
)
"""Variables of users who come from TGI, to the option. Source: djl-serving d21927c,
dockerd-entrypoint-with-cuda-compat.sh, which turns them into `OPTION_*` (the requests that may wait into the length of
DJL's own queue, the GPUs into `TENSOR_PARALLEL_DEGREE`) where those are not set."""

# Source: djl-serving d21927c, ModelInfo.java: names are lower-cased, and only if they are upper-case throughout.
_ENV_SPECIAL = {"entrypoint": "entryPoint"}
_UPPER = re.compile(r"[A-Z_\d]+")

_FILE_PREFIX = "option."
MAX_FILE_BYTES = 1 << 20
_MAX_PATH = 4096  # Linux's own limit
_NO_PATHS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "none", "null"})
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Setting:
    """One value with the place it comes from."""

    name: str
    """As written, without prefix."""
    value: object
    origin: str
    source: str
    """File, environment …: the settings of one source contradict each other, those of two override each other."""
    by_user: bool
    """The user addressed it to us (`option.*`, `OPTION_*`, command line), so an unknown name is an error."""
    remarks: tuple[tuple[Level, str], ...] = ()
    """What is odd about the way it is written."""


def environment() -> dict[str, str]:
    """A copy of the process environment; everything else takes it as an argument."""
    return dict(os.environ)


def without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables but those that set options of a model, for a second model of the process."""
    fields = {variable for name in ServingOptions.model_fields for variable in option(name).env}
    named = {*SAGEMAKER, *HUB, *TGI, *fields}
    return {
        name: value
        for name, value in environ.items()
        if name not in named and not name.startswith((_ENV_PREFIX, _ARGUMENT_PREFIX))
    }


def from_environ(environ: Mapping[str, str]) -> list[Setting]:
    """Settings of the `OPTION_*` variables, then of `ARGS_*` (arguments of DJL Serving), named as DJL names them."""
    options: list[Setting] = []
    arguments: list[Setting] = []
    for variable, value in environ.items():
        for prefix, found in ((_ENV_PREFIX, options), (_ARGUMENT_PREFIX, arguments)):
            name = variable.removeprefix(prefix)
            if name in {variable, ""}:
                continue
            name = name.lower() if _UPPER.fullmatch(name) else name
            name = _ENV_SPECIAL.get(name, name)
            remarks: tuple[tuple[Level, str], ...] = ()
            earlier = next((entry for entry in found if entry.name == name), None)
            if earlier is not None and value.strip() not in {"", earlier.value}:
                remarks = (
                    ("note", f"environment {variable} is the same; {earlier.origin} counts"),
                )
            origin = f"environment {variable}"
            found.append(Setting(name, value, origin, ENVIRONMENT, found is options, remarks))
    return options + arguments


def worker_variables(written: Sequence[Setting]) -> dict[str, Setting]:
    """The variables that `option.env` has DJL Serving give its Python process, each with value and origin.

    Source: djl-serving d21927c, PyModel.java: split at commas, then at the first equals sign.
    """
    setting = next((entry for entry in written if entry.name == "env"), None)
    if setting is None:
        return {}
    pairs = (part.partition("=") for part in str(setting.value).split(","))
    return {
        name.strip(): replace(setting, name=name.strip(), value=told.strip())
        for name, sign, told in pairs
        if sign
    }


def with_worker_variables(
    environ: Mapping[str, str], variables: Mapping[str, Setting]
) -> dict[str, str]:
    """The variables as the handler has them under DJL Serving: those of `option.env` laid over the others."""
    return {**environ, **{name: str(setting.value) for name, setting in variables.items()}}


def from_sagemaker(environ: Mapping[str, str]) -> list[Setting]:
    """Settings of SageMaker's own variables; the others that it knows belong to DJL Serving."""
    return _from_variables(environ, SAGEMAKER, "SageMaker")


def from_hub(
    environ: Mapping[str, str],
    model_dir: Path | None,
    stronger: Sequence[Setting],
    *,
    in_djl: bool,
) -> tuple[list[Setting], dict[str, str]]:
    """Settings of the variables that name a model of the hub, and those that say nothing here with the reason.

    `stronger` is what comes before them. Revision and task belong to the model that they are given with: where
    something else names the model, they are not used for it.
    """
    given = {name: value for name, value in environ.items() if name in HUB and value.strip()}
    named = next((entry.origin for entry in stronger if entry.name == "model_id"), None)
    if "HF_MODEL_ID" not in given:
        reason = "it goes with HF_MODEL_ID, which is not set; for another model there is OPTION_REVISION (or _TASK)"
    elif in_djl:
        reason = "DJL Serving makes a model folder of its own from it"
    elif model_dir is not None and _holds_model(model_dir):
        reason = f"{model_dir} holds a model itself"
    elif named is not None:
        reason = f"the model is named by {named}"
    else:
        return _from_variables(given, HUB, HUB_SOURCE), {}
    return [], dict.fromkeys(given, reason)


def from_fallbacks(environ: Mapping[str, str]) -> list[Setting]:
    """Settings of the variables that stand in for options: TGI's, then such as `TENSOR_PARALLEL_DEGREE`."""
    fields = {
        variable: name
        for name in ServingOptions.model_fields
        for variable in option(name).env
        if variable not in HUB
    }
    late = {"SM_NUM_GPUS": TGI["SM_NUM_GPUS"]}  # the container sets TENSOR_PARALLEL_DEGREE from it
    early = {variable: name for variable, name in TGI.items() if variable not in late}
    return _from_variables(environ, {**early, **fields, **late}, "fallbacks")


def from_djl(properties: Mapping[str, object], written: Sequence[Setting]) -> list[Setting]:
    """Settings that DJL Serving passes: what the user wrote, changed or not, mixed with DJL's own keys.

    The prefix is gone by then, so a value keeps the origin of the setting in `written` that it equals, blanks around
    it left aside. They come in the order of `written`, not in that of Java's hash map: of two names for one option the
    user's first one counts.
    """
    origins: dict[tuple[str, object], str] = {}
    firsts: dict[str, Setting] = {}
    ranks: dict[str, int] = {}
    for rank, setting in enumerate(written):
        origins.setdefault((setting.name, setting.value), setting.origin)
        firsts.setdefault(setting.name, setting)
        ranks.setdefault(setting.name, rank)
    return [
        Setting(name, value, _origin(origins, firsts, name, value), DJL, by_user=False)
        for name, value in sorted(
            properties.items(), key=lambda entry: (ranks.get(entry[0], len(ranks)), entry[0])
        )
    ]


def from_folder(model_dir: Path | None) -> list[Setting]:
    """The setting that the model folder is."""
    if model_dir is None:
        return []
    return [Setting("model_dir", model_dir, "the model folder", "argument", by_user=False)]


def from_overrides(overrides: Mapping[str, str], origin: str = COMMAND_LINE) -> list[Setting]:
    """Settings that win over all others: those of the command line, unless `origin` says where else they come from."""
    return [Setting(name, value, origin, COMMAND_LINE, True) for name, value in overrides.items()]


def _from_variables(
    environ: Mapping[str, str], names: Mapping[str, str], source: str
) -> list[Setting]:
    """One setting for each variable of `names` (to the name it sets) that there is, in that order."""
    return [
        Setting(name, environ[variable], f"environment {variable}", source, by_user=True)
        for variable, name in names.items()
        if variable in environ
    ]


def _origin(
    origins: Mapping[tuple[str, object], str],
    firsts: Mapping[str, Setting],
    name: str,
    value: object,
) -> str:
    if not isinstance(value, str):
        return DJL
    value, first = value.strip(), firsts.get(name)
    if first is not None and str(first.value).startswith("s3://") and value != first.value:
        # Source: djl-serving d21927c, ModelInfo.java downloadS3, downloadDraftModel.
        return f"{first.origin}, downloaded by DJL"
    return origins.get((name, value), DJL)


def _holds_model(model_dir: Path) -> bool:
    try:
        return (model_dir / "config.json").exists()
    except (OSError, ValueError):
        return False


def from_file(model_dir: Path) -> list[Setting]:
    """Settings of the folder's `serving.properties`, as `from_properties` reads them; none without the file.

    Raises:
        ConfigError: the file cannot be read or holds a broken escape.
    """
    path = model_dir / FILE_NAME
    try:
        there = path.exists()
    except (OSError, ValueError):
        there = True  # reading it says what is wrong
    return from_properties(path) if there else []


def from_properties(path: Path) -> list[Setting]:
    """Settings of a properties file, those with the `option.` prefix first.

    Read as Java's `Properties.load` reads bytes: ISO-8859-1 and escapes, the last of equal keys counts. Keys without
    the prefix are DJL Serving's arguments, which reach a handler too (`batch_size`, `engine`, `minWorkers` …). The mark
    that Windows editors put in front of UTF-8 is skipped.

    Raises:
        ConfigError: the file cannot be read, is larger than 1 MiB or holds a broken escape.
    """
    content = _read_file(path)
    try:
        entries = list(javaproperties.parse(io.BytesIO(content.removeprefix(codecs.BOM_UTF8))))
    except ValueError as error:
        fix = r"Write \\ for a backslash, \uXXXX for a character"
        message = f"{str(path)!r} is not a properties file: {error}. {fix}"
        raise ConfigError(message) from error
    marked = content.startswith(codecs.BOM_UTF8)
    found: dict[str, Setting] = {}
    line = 1
    for entry in entries:
        if isinstance(entry, javaproperties.KeyValue):
            by_user = entry.key.startswith(_FILE_PREFIX)
            name, origin = entry.key.removeprefix(_FILE_PREFIX), f"{path} line {line}"
            remarks = (*_unseen(origin, marked=marked and line == 1), *_again(found.get(entry.key)))
            found[entry.key] = Setting(name, entry.value, origin, FILE_NAME, by_user, remarks)
        line += len(_LINE_END.findall(entry.source))
    if "max_dynamic_batch_size" in found:
        # Source: djl-serving d21927c, ModelInfo.java configPerModelSettings: it is passed on under this name.
        found.setdefault("batch_size", replace(found["max_dynamic_batch_size"], name="batch_size"))
    return sorted(found.values(), key=lambda setting: not setting.by_user)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}. Make it a readable file, or remove it"
        raise ConfigError(message) from error
    except ValueError as error:
        message = f"{str(path)!r} is no path: {error}"
        raise ConfigError(message) from error
    if len(content) > MAX_FILE_BYTES:
        message = f"{path} has more than {MAX_FILE_BYTES} bytes; expected a properties file"
        raise ConfigError(message)
    return content


def _unseen(origin: str, *, marked: bool) -> Iterator[tuple[Level, str]]:
    if marked:
        yield (
            "warning",
            f"{origin} begins with a byte order mark, which DJL Serving takes for a part of the key: it does not see "
            "this setting. Save the file without the mark",
        )


def _again(earlier: Setting | None) -> Iterator[tuple[Level, str]]:
    if earlier is not None:
        yield "note", f"{earlier.origin} sets it too, and the last one counts"


def content(value: object, folder: Path) -> tuple[object, str]:
    """The JSON of the file that `value` names, absolute or relative to `folder`; `value` itself if it is no path.

    A path is a text that is neither a word for yes, no or nothing nor the beginning of an object or list. The second
    part says what is wrong with the file: at most 1 MiB of JSON is expected.
    """
    if not isinstance(value, str) or value.lower() in _NO_PATHS or value[:1] in {"{", "[", "("}:
        return value, ""
    if len(value) > _MAX_PATH:
        return None, f"a path has at most {_MAX_PATH} characters"
    path, named = folder / value, repr(str(folder / value))
    try:
        if not path.is_file():
            return None, f"there is no file {named}"
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return None, f"the file {named} cannot be read: {error.strerror}"
    except ValueError as error:
        return None, f"{named} is no path: {error}"
    if len(data) > MAX_FILE_BYTES:
        return None, f"the file {named} has more than {MAX_FILE_BYTES} bytes"
    try:
        return json.loads(data), ""
    except (ValueError, RecursionError) as error:
        return None, f"the file {named} is not JSON: {error}"
