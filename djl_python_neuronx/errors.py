"""All errors that this package raises, as a tree.

* ServingError                          500
  + ConfigError(ValueError)             500  collects every problem of a configuration, then raises once
    - UnknownOptionError
    - InvalidOptionError
    - IncompatibleOptionsError
  + ArtifactError                       500
    - ArtifactNotFoundError
    - ArtifactAccessError
    - UnknownFormatError
    - ArtifactMismatchError
  + BackendError                        500
    - BackendUnavailableError           503
      - CoresTakenError                 503
    - CompileError                      500
    - DeviceMemoryError                 507
    - StepError                         424
  + FormatterError                      424
  + RequestError(ValueError)            400
    - UnknownModelError                 404
    - UnsupportedParameterError         400
    - UnauthorizedError                 401
    - PromptTooLongError                413
    - TextLimitError                    400
    - BodyTooLargeError                 413
    - QueueFullError                    503
    - RequestTimeoutError               408
    - RequestAbortedError               499
    - HttpError                         404

A message names what is wrong, what was expected and what to do. It never contains prompts, payloads or credentials.
`status` is the HTTP status, also under DJL Serving; `code` is a stable name for logs, metrics and error bodies.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

_USERINFO = re.compile(
    # A secret key can hold slashes. No bucket has a colon; an `arn:` has. A path has one of the two slashes left.
    r"(s3:/{1,2})(?!arn:)[^/:\s]*:(?:(?!:/)\S)*@"
    # The slash may be one of the password's, unless what precedes it is a port.
    r"|(https?:/{1,2}|s3:/|://)(?!arn:)(?:[^/?#\s]*|[^/:\s]*:(?!\d+/)(?:(?!:/)\S)*)@",
    re.IGNORECASE,
)
_QUERY = re.compile(r"([?&][^\s=&?'\"]+=)[^\s&'\"]+")


def redacted(text: str) -> str:
    """The text without the credentials in its URIs: user and password, and the values of a query."""
    return _QUERY.sub(r"\1***", _USERINFO.sub(r"\1\2", text))


def describe_differences(
    differences: Mapping[str, tuple[object, object]],
    origins: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """List what differs: key -> (compiled, wanted), each wanted value with the origin of its option."""
    return "; ".join(
        f"{key}: compiled {compiled!r}, wanted {wanted!r}"
        + (f" ({origins[name]})" if (name := key.partition(".")[0]) in origins else "")
        for key, (compiled, wanted) in sorted(differences.items())
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'top_p'?``, or an empty string if no known name is similar."""
    if len(name) > 64:
        return ""
    plain = {_plain(other): other for other in known}
    near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.7)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""


def _plain(name: str) -> str:
    """The name in snake case: `nPositions` and `N-POSITIONS` are `n_positions`."""
    return re.sub(r"\W|(?<=[a-z])(?=[A-Z])", "_", name).lower()


class ServingError(Exception):
    """Base class of all errors of this package."""

    status: int = 500
    code: ClassVar[str] = "serving_error"
    retry_after_s: int | None = None
    """The value of the Retry-After header: every 503 has one."""
    protocol: str = ""
    """The wire protocol of a request that could not be parsed: the answer has its shape."""

    def __init__(self, message: str = "") -> None:
        """Set the message, of which credentials are left out."""
        super().__init__(redacted(message))

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None) -> None:
        """Set the HTTP status and the code of a subclass; by default those of its parent."""
        super().__init_subclass__()
        cls.status, cls.code = status or cls.status, code or cls.code


class ConfigError(ServingError, ValueError, code="config_error"):
    """One or more invalid settings, listed in `problems`."""

    _listed: tuple[ConfigError, ...] = ()

    def __init__(self, message: str, problems: Sequence[ConfigError] = ()) -> None:
        super().__init__(message)
        self._listed = tuple(problems)

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """The problems that the message lists; of a single problem the error itself."""
        return self._listed or (self,)

    @staticmethod
    def collect(problems: Sequence[ConfigError]) -> ConfigError:
        """Return one error that lists all of `problems`, or the problem itself if there is one."""
        flat = [leaf for problem in problems for leaf in problem.problems]
        if len(flat) == 1:
            return flat[0]
        lines = "\n".join(f"  - {problem}" for problem in flat)
        return ConfigError(f"{len(flat)} problems in the configuration:\n{lines}", flat)


class UnknownOptionError(ConfigError, code="unknown_option"):
    """An option set by the user that does not exist."""

    def __init__(self, name: str, origin: str, hint: str = "") -> None:
        super().__init__(
            f"unknown option {name!r} from {origin}{hint} "
            "(remove it, or see docs/options.md for every option)"
        )
        self.name = name
        self.origin = origin


class InvalidOptionError(ConfigError, code="invalid_option"):
    """An option whose value is not allowed."""

    def __init__(self, name: str, value: object, origin: str, allowed: str) -> None:
        super().__init__(f"option {name!r} is {value!r} (from {origin}); expected {allowed}")
        self.name = name
        self.value = value
        self.origin = origin
        self.allowed = allowed


class IncompatibleOptionsError(ConfigError, code="incompatible_options"):
    """Options that are valid alone, but not together or not with this model or machine."""


class ArtifactError(ServingError, code="artifact_error"):
    """An unusable model folder."""


class ArtifactNotFoundError(ArtifactError, FileNotFoundError, code="artifact_not_found"):
    """The model, or one of its files, does not exist."""


class ArtifactAccessError(ArtifactError, code="artifact_access"):
    """The model exists but cannot be read."""


class UnknownFormatError(ArtifactError, code="unknown_format"):
    """A folder of no known format; the message lists the expected and the existing files."""


class ArtifactMismatchError(ArtifactError, code="artifact_mismatch"):
    """A compiled model for other settings than the current ones; `differences` maps key to (compiled, wanted).

    `origins`: of the options that are set.
    """

    def __init__(
        self,
        differences: Mapping[str, tuple[object, object]],
        where: str,
        origins: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        listed = describe_differences(differences, origins)
        super().__init__(
            f"the artifact at {where} was compiled for other settings: {listed}. "
            "Serve with the compiled values, or set option.on_mismatch=recompile."
        )
        self.differences = dict(differences)
        self.where = where


class BackendError(ServingError, code="backend_error"):
    """A failure of the backend. If `fatal`, the backend cannot be used any more."""

    fatal: bool = False
    lasting: bool = False
    """The same compile would fail again, on any machine: the compiler refuses the graph, or it is too large."""
    host_full: bool = False
    """The host's memory was used up, or most likely so: a signal has ended a compile."""


class BackendUnavailableError(BackendError, status=503, code="backend_unavailable"):
    """The backend's library or device is missing, the engine has failed, or the server stops."""

    retry_after_s = 1


class CoresTakenError(BackendUnavailableError, code="cores_taken"):
    """The Neuron runtime of a process did not start: most likely another process holds its cores."""


class CompileError(BackendError, code="compile_error"):
    """The compiler failed; the message ends with the tail of its log."""


class DeviceMemoryError(BackendError, status=507, code="device_memory"):
    """The model or its cache does not fit into device memory. DJL reads 507 as out of memory."""


class StepError(BackendError, status=424, code="step_error"):
    """One device call failed. Only the sequences of that call are lost."""


class FormatterError(ServingError, status=424, code="formatter_error"):
    """A formatter of the model folder's `model.py` failed on one request."""


PROMPT = "the prompt"
"""In place of a field's name: the field that has the prompt in the request's protocol."""


class RequestError(ServingError, ValueError, status=400, code="bad_request"):
    """An invalid request."""

    param: str | None = None
    """The field of the request that is wrong, or `PROMPT`."""

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError, status=404, code="model_not_found"):
    """A model, by its name in a path or a body, that this server does not serve."""


class UnsupportedParameterError(RequestError, code="unsupported_parameter"):
    """A parameter that is unknown, or not supported by this deployment."""


class UnauthorizedError(RequestError, status=401, code="invalid_api_key"):
    """A request without a valid API key."""


class PromptTooLongError(RequestError, status=413, code="prompt_too_long"):
    """A prompt with more tokens than the largest prefill bucket or the slot holds."""

    def __init__(self, message: str = "", param: str = PROMPT) -> None:
        super().__init__(message, param)


class TextLimitError(RequestError, code="text_limit"):
    """A text on which the model's chat template or tokenizer takes too much time or memory. A retry fails too."""


class BodyTooLargeError(RequestError, status=413, code="body_too_large"):
    """A request body above the server's size limit."""


class QueueFullError(RequestError, status=503, code="queue_full"):
    """The waiting queue is full, or there are too many connections or large bodies."""

    retry_after_s = 1


class RequestTimeoutError(RequestError, status=408, code="request_timeout"):
    """The request waited too long for a slot, or got none before its deadline, or its client sent it too slowly."""


class RequestAbortedError(RequestError, status=499, code="request_aborted"):
    """The request was aborted, because its client has left or reads too slowly."""


class HttpError(RequestError, status=404, code="http_error"):
    """A request without a route: an unknown path, or another method."""

    def __init__(self, message: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.status = status or self.status


def load_failure(error: BaseException) -> ServingError:
    """Return the error for the clients of a model that could not be loaded because of `error`."""
    if isinstance(error, ServingError):
        return error
    kind = DeviceMemoryError if isinstance(error, MemoryError) else ServingError
    return kind(f"the model could not be loaded ({type(error).__name__}: {error})")


def kinds(root: type[ServingError]) -> list[type[ServingError]]:
    """Return an error and all that are a kind of it."""
    found = [root]
    for kind in found:  # grows
        found += kind.__subclasses__()
    return found


def to_json(error: ServingError) -> dict[str, Any]:
    """Return the code, the message and the attributes of an error: arguments of `revive` in another process.

    Of a `ConfigError` the listed problems stay behind: the message has them.
    """
    public = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return {"code": error.code, "message": str(error), **public}


def revive(code: str, message: str, **attributes: object) -> ServingError:
    """Return an error of another process, of the class with this code; a `ServingError` if no class has it.

    It has no other attributes than those given.
    """
    found = next((kind for kind in kinds(ServingError) if kind.code == code), ServingError)
    error = found.__new__(found)
    Exception.__init__(error, message)
    vars(error).update(attributes)
    return error


def json_type(value: object) -> str:
    """The JSON type of a value, for error messages. The value itself may be part of a prompt."""
    if value == "":
        return "an empty string"
    if value == []:
        return "an empty list"
    names = {
        list: "a list",
        str: "a string",
        dict: "an object",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
