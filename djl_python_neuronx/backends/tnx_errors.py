"""What the Neuron compiler and runtime raise, in this package's words."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from djl_python_neuronx.errors import (
    ArtifactError,
    BackendError,
    BackendUnavailableError,
    CompileError,
    DeviceMemoryError,
    ServingError,
    StepError,
)

_TAIL_LINES = 15
_COMPILER = re.compile(
    r"neuronx?-cc\b|\bcompil(?:er|ation|ing)\b.{0,40}\b(?:fail|error|status)", re.IGNORECASE
)


class _Fault(NamedTuple):
    pattern: re.Pattern[str]
    kind: Literal["memory", "cores", "lost", "neff", "version"]
    advice: str


def _fault(
    pattern: str, kind: Literal["memory", "cores", "lost", "neff", "version"], advice: str
) -> _Fault:
    return _Fault(re.compile(pattern, re.IGNORECASE), kind, advice)


# Source: AWS Neuron documentation, nrt_status.h and "Neuron Runtime troubleshooting"; the runtime's texts carry the
# names, the libraries around it at times the bare numbers (`status=4`).
_FAULTS = (
    _fault(
        r"no matching NEFF|find a matching NEFF",
        "neff",
        "Compile it again with these options, or serve with those that it was compiled with",
    ),
    _fault(
        r"NRT_UNSUPPORTED_NEFF_VERSION|\bstatus[=: ]+10\b",
        "version",
        "Compile it again with the compiler of this image",
    ),
    _fault(
        r"LOAD_NOT_ENOUGH_NC|NeuronCores? (?:are|is) required|cores?\(?s?\)? not available|(?<!exit )\bstatus[=: ]+9\b",
        "cores",
        "Lower tensor_parallel_degree, give the process more cores (NEURON_RT_NUM_CORES, NEURON_RT_VISIBLE_CORES), or "
        "end the process that holds them (neuron-ls shows it)",
    ),
    _fault(
        r"device or resource busy|NRT_EXEC_NC_BUSY|\bEBUSY\b|in use by (?:another )?process",
        "cores",
        "End the process that holds the device (neuron-ls shows it), or choose others with NEURON_RT_VISIBLE_CORES",
    ),
    _fault(
        r"NRT_RESOURCE|HOST_MEM_ALLOC|RESOURCE_EXHAUSTED|out of memory|failed to allocate|cannot allocate memory|"
        r"allocate memory|(?<!exit )\bstatus[=: ]+(?:4|11)\b",
        "memory",
        "Lower max_rolling_batch_size or n_positions, raise tensor_parallel_degree, or use quantize",
    ),
    _fault(
        r"NRT_(?:TIMEOUT|HW_ERROR|UNINITIALIZED|CLOSED|INVALID_HANDLE|EXEC_UNIT_UNRECOVERABLE|EXEC_HW_ERR\w*|"
        r"NETWORK_PROXY_FAILURE)|\bstatus[=: ]+(?:5|6|13|14|101|120\d)\b",
        "lost",
        "The device is lost to this process: start it again; if that does not help, replace the instance",
    ),
)


def of_load(error: Exception, what: str) -> ServingError:
    """An error of ours for one that a load or a compilation raised; `what` names the model."""
    if isinstance(error, ServingError):
        return error
    text = str(error)
    fault = _find(error)
    if fault is None:
        if not isinstance(error, OSError) and _COMPILER.search(text):
            return CompileError(f"{what} does not compile. The end of the log:\n{_tail(text)}")
        return BackendError(f"{what} cannot be loaded: {type(error).__name__}: {_tail(text)}")
    message = f"{what} cannot be loaded: {_tail(text)}. {fault.advice}"
    if fault.kind in {"neff", "version"}:
        return ArtifactError(message)
    if fault.kind == "memory":
        return DeviceMemoryError(message)
    return BackendUnavailableError(message)


def of_step(error: Exception, what: str) -> BackendError:
    """An error of ours for one that a device call raised; `fatal` if no further call can succeed."""
    if isinstance(error, BackendError):
        return error
    fault = _find(error)
    if fault is None:
        return StepError(f"{what} failed: {type(error).__name__}: {_tail(str(error))}")
    message = f"{what} failed: {_tail(str(error))}. {fault.advice}"
    translated = DeviceMemoryError(message) if fault.kind == "memory" else StepError(message)
    translated.fatal = fault.kind in {"cores", "lost"}
    return translated


def _find(error: Exception) -> _Fault | None:
    if isinstance(error, MemoryError):
        return next(fault for fault in _FAULTS if fault.kind == "memory")
    return next((fault for fault in _FAULTS if fault.pattern.search(str(error))), None)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])
