"""Every error that this package raises on purpose.

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

A message says what is wrong, what was expected and what to do. Prompts and payloads never enter a message.
`status` is what HTTP and DJL answer; `code` is the stable word for logs, metrics and error bodies.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'top_p'?``, or an empty string when nothing is near."""
    if len(name) > 64:
        return ""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


class ServingError(Exception):
    """Base of everything raised on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "serving_error"


class ConfigError(ServingError, ValueError):
    """One or more settings cannot be used; `problems` holds each of them."""

    code = "config_error"

    def __init__(self, message: str, problems: Sequence[ConfigError] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[ConfigError, ...] = tuple(problems) or (self,)

    @staticmethod
    def collect(problems: Sequence[ConfigError]) -> ConfigError:
        """One error that lists all of `problems`; a single problem is returned as it is."""
        flat = [leaf for problem in problems for leaf in problem.problems]
        if len(flat) == 1:
            return flat[0]
        lines = "\n".join(f"  - {problem}" for problem in flat)
        return ConfigError(f"{len(flat)} problems in the configuration:\n{lines}", flat)


class UnknownOptionError(ConfigError):
    """An option that the user wrote and that does not exist here."""

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
    """Options that are each fine but not together, or not with this model or machine."""

    code = "incompatible_options"


class ArtifactError(ServingError):
    """A model folder that cannot be used."""

    code = "artifact_error"


class ArtifactNotFoundError(ArtifactError, FileNotFoundError):
    """The model, or a file that it needs, is not there."""

    code = "artifact_not_found"


class ArtifactAccessError(ArtifactError):
    """The model is there but cannot be read."""

    code = "artifact_access"


class UnknownFormatError(ArtifactError):
    """A folder that matches no known format; the message lists what was looked for and found."""

    code = "unknown_format"


class ArtifactMismatchError(ArtifactError):
    """What was compiled differs from what is asked for; `differences` maps key to (compiled, wanted)."""

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
    """The backend cannot do what was asked. `fatal` means that it will never work again."""

    code = "backend_error"
    fatal: bool = False


class BackendUnavailableError(BackendError):
    """The backend's library or device is missing, or the engine has died."""

    status = 503
    code = "backend_unavailable"


class CompileError(BackendError):
    """The compiler failed; the message ends with the tail of its log."""

    code = "compile_error"


class DeviceMemoryError(BackendError):
    """The model or its cache does not fit; DJL takes 507 as out of memory."""

    status = 507
    code = "device_memory"


class StepError(BackendError):
    """One device call failed; the sequences in it are lost, nobody else's."""

    status = 424
    code = "step_error"


class RequestError(ServingError, ValueError):
    """The request cannot be served as it is."""

    status = 400
    code = "bad_request"


class UnsupportedParameterError(RequestError):
    """A parameter that is unknown, or that this deployment cannot honour."""

    code = "unsupported_parameter"


class PromptTooLongError(RequestError):
    """More prompt tokens than the largest prefill bucket or the slot can hold."""

    status = 413
    code = "prompt_too_long"


class BodyTooLargeError(RequestError):
    """A request body above the server's size limit."""

    status = 413
    code = "body_too_large"


class QueueFullError(RequestError):
    """The waiting queue is full; `retry_after_s` goes into the Retry-After header."""

    status = 503
    code = "queue_full"
    retry_after_s: int = 1


class RequestTimeoutError(RequestError):
    """The request waited longer than it may for a free slot."""

    status = 408
    code = "request_timeout"


class RequestAbortedError(RequestError):
    """The request was given up: by its client, by a reset, or because the server stops."""

    status = 499
    code = "request_aborted"
