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
    - CompileError                      500
    - DeviceMemoryError                 507
    - StepError                         424
  + RequestError(ValueError)            400
    - UnsupportedParameterError         400
    - PromptTooLongError                413
    - BodyTooLargeError                 413
    - QueueFullError                    503
    - RequestTimeoutError               408
    - RequestAbortedError               499

A message names what is wrong, what was expected and what to do. It never contains prompts or payloads.
`status` is the HTTP status, also under DJL Serving; `code` is a stable name for logs, metrics and error bodies.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'top_p'?``, or an empty string if no known name is similar."""
    if len(name) > 64:
        return ""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


class ServingError(Exception):
    """Base class of all errors of this package."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "serving_error"


class ConfigError(ServingError, ValueError):
    """One or more invalid settings, listed in `problems`."""

    code = "config_error"

    def __init__(self, message: str, problems: Sequence[ConfigError] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[ConfigError, ...] = tuple(problems) or (self,)

    @staticmethod
    def collect(problems: Sequence[ConfigError]) -> ConfigError:
        """Returns one error that lists all of `problems`, or the problem itself if there is one."""
        flat = [leaf for problem in problems for leaf in problem.problems]
        if len(flat) == 1:
            return flat[0]
        lines = "\n".join(f"  - {problem}" for problem in flat)
        return ConfigError(f"{len(flat)} problems in the configuration:\n{lines}", flat)


class UnknownOptionError(ConfigError):
    """An option set by the user that does not exist."""

    code = "unknown_option"

    def __init__(self, name: str, origin: str, known: Iterable[str]) -> None:
        super().__init__(
            f"unknown option {name!r} from {origin}{did_you_mean(name, known)} "
            "(remove it, or see docs/options.md for every option)"
        )
        self.name = name
        self.origin = origin


class InvalidOptionError(ConfigError):
    """An option whose value is not allowed."""

    code = "invalid_option"

    def __init__(self, name: str, value: object, origin: str, allowed: str) -> None:
        super().__init__(f"option {name!r} is {value!r} (from {origin}); expected {allowed}")
        self.name = name
        self.value = value
        self.origin = origin
        self.allowed = allowed


class IncompatibleOptionsError(ConfigError):
    """Options that are valid alone, but not together or not with this model or machine."""

    code = "incompatible_options"


class ArtifactError(ServingError):
    """An unusable model folder."""

    code = "artifact_error"


class ArtifactNotFoundError(ArtifactError, FileNotFoundError):
    """The model, or one of its files, does not exist."""

    code = "artifact_not_found"


class ArtifactAccessError(ArtifactError):
    """The model exists but cannot be read."""

    code = "artifact_access"


class UnknownFormatError(ArtifactError):
    """A folder of no known format; the message lists the expected and the existing files."""

    code = "unknown_format"


class ArtifactMismatchError(ArtifactError):
    """A compiled model for other settings than the current ones; `differences` maps key to (compiled, wanted)."""

    code = "artifact_mismatch"

    def __init__(self, differences: Mapping[str, tuple[object, object]], where: str) -> None:
        listed = "; ".join(
            f"{key}: compiled {a!r}, wanted {b!r}" for key, (a, b) in sorted(differences.items())
        )
        super().__init__(
            f"the artifact at {where} was compiled for other settings: {listed}. "
            "Serve with the compiled values, or set option.on_mismatch=recompile."
        )
        self.differences = dict(differences)


class BackendError(ServingError):
    """A failure of the backend. If `fatal`, the backend cannot be used any more."""

    code = "backend_error"
    fatal: bool = False


class BackendUnavailableError(BackendError):
    """The backend's library or device is missing, or the engine has failed."""

    status = 503
    code = "backend_unavailable"


class CompileError(BackendError):
    """The compiler failed; the message ends with the tail of its log."""

    code = "compile_error"


class DeviceMemoryError(BackendError):
    """The model or its cache does not fit into device memory. DJL reads 507 as out of memory."""

    status = 507
    code = "device_memory"


class StepError(BackendError):
    """One device call failed. Only the sequences of that call are lost."""

    status = 424
    code = "step_error"


class RequestError(ServingError, ValueError):
    """An invalid request."""

    status = 400
    code = "bad_request"


class UnsupportedParameterError(RequestError):
    """A parameter that is unknown, or not supported by this deployment."""

    code = "unsupported_parameter"


class PromptTooLongError(RequestError):
    """A prompt with more tokens than the largest prefill bucket or the slot holds."""

    status = 413
    code = "prompt_too_long"


class BodyTooLargeError(RequestError):
    """A request body above the server's size limit."""

    status = 413
    code = "body_too_large"


class QueueFullError(RequestError):
    """The waiting queue is full. `retry_after_s` is the value of the Retry-After header."""

    status = 503
    code = "queue_full"
    retry_after_s: int = 1


class RequestTimeoutError(RequestError):
    """The request waited too long for a free slot."""

    status = 408
    code = "request_timeout"


class RequestAbortedError(RequestError):
    """The request was aborted: by its client, by a reset of DJL Serving, or because the server stops."""

    status = 499
    code = "request_aborted"
