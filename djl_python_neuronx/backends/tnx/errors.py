"""Translation of errors of the Neuron compiler and runtime."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


_Kind = Literal["memory", "cores", "busy", "lost", "neff", "version", "invalid"]


class _Fault(NamedTuple):
    pattern: re.Pattern[str]
    kind: _Kind
    advice: str
    codes: frozenset[int]
    """The codes of the names in the pattern."""


def _fault(pattern: str, kind: _Kind, advice: str, codes: Iterable[int] = ()) -> _Fault:
    return _Fault(re.compile(pattern, re.IGNORECASE), kind, advice, frozenset(codes))


# Source: AWS Neuron documentation, nrt_status.h. Some libraries around the runtime give the number alone
# (`nrt_load_collectives status=4 message="Allocation Failure"`), which stands for the name. Status codes that
# call for no more than a retry, or that the input causes, are left out.
_STATUS = re.compile(
    r"(?:\bnrt\w*:?|load the model) status(?:[ _]code)?[=: ]+(?P<code>\d+)\b", re.IGNORECASE
)
_HOST_MEMORY = _fault(
    r"NRT_FAIL_HOST_MEM_ALLOC|cannot allocate memory|\bENOMEM\b",
    "memory",
    "The host is out of memory, not the device: lower compilation_worker_count, or use a machine with more memory",
    codes={11},
)
# Source of the texts: AWS Neuron documentation, "Neuron Runtime troubleshooting", and reports of users of these
# libraries. The first match counts.
_FAULTS = (
    _fault(
        r"no matching NEFF|find a matching NEFF",
        "neff",
        "Compile it again with these options, or serve with those that it was compiled with",
    ),
    _fault(
        r"NRT_UNSUPPORTED_NEFF_VERSION|NEFF version mismatch",
        "version",
        "Compile it again with the compiler of this image",
        codes={10},
    ),
    _fault(
        r"NRT_LOAD_NOT_ENOUGH_NC|NeuronCores? (?:are|is) required|cores?\(?s?\)? not available|could not open the nd\d",
        "cores",
        "Lower tensor_parallel_degree, give the process more cores (NEURON_RT_NUM_CORES, NEURON_RT_VISIBLE_CORES), or "
        "end the process that holds them (neuron-ls shows it)",
        codes={9},
    ),
    # The whole message of torch-neuronx if the runtime fails to start; the reason is in the runtime's log.
    _fault(
        r"runtime (?:could not|cannot) be initialized|in nrt_init\b|neuron driver version|no neuron device available",
        "cores",
        "The runtime's log, just before this, has the reason: another process holds the cores (neuron-ls shows it; end "
        "it, or choose others with NEURON_RT_VISIBLE_CORES), the machine has fewer cores, or the driver is missing",
    ),
    _fault(
        r"device or resource busy|\bEBUSY\b|in use by (?:another )?process",
        "cores",
        "End the process that holds the device (neuron-ls shows it), or choose others with NEURON_RT_VISIBLE_CORES",
    ),
    _fault(
        r"NRT_EXEC_NC_BUSY",
        "busy",
        "Another model or thread of this process runs on the core: serve each model from a process of its own",
        codes={1005},
    ),
    _HOST_MEMORY,
    _fault(
        r"NRT_RESOURCE|RESOURCE_EXHAUSTED|allocation failure|out of memory|failed to alloc|allocate memory",
        "memory",
        "Lower max_rolling_batch_size or n_positions, raise tensor_parallel_degree, or use quantize",
        codes={4},
    ),
    _fault(
        r"NRT_(?:TIMEOUT|HW_ERROR|UNINITIALIZED|CLOSED|INVALID_HANDLE|NETWORK_PROXY_FAILURE|EXEC_HW_ERR\w*|"
        r"EXEC_SW_NQ_OVERFLOW|EXEC_UNIT_(?:UNRECOVERABLE|DISABLED))",
        "lost",
        "The device is lost to this process: start it again; if that does not help, replace the instance",
        codes={3, 5, 6, 13, 14, 101, *range(1200, 1207)},
    ),
    _fault(
        r"\bNRT_INVALID\b|unsupported topology",
        "invalid",
        "The runtime's log, just before this, has the reason. If it names the topology, set a tensor_parallel_degree "
        "that the machine supports (see djl-neuronx check); else compile again with the compiler of this image",
        codes={2},
    ),
)


def of_load(error: Exception, what: str) -> ServingError:
    """Return the `ServingError` for an error of a load or a compilation; `what` names the model."""
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
    return BackendError(message) if fault.kind == "invalid" else BackendUnavailableError(message)


def of_step(error: Exception, what: str) -> BackendError:
    """Return the `BackendError` for an error of a device call; `fatal` if no further call can succeed."""
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
        return _HOST_MEMORY
    text = str(error)
    codes = {int(found["code"]) for found in _STATUS.finditer(text)}
    faults = (fault for fault in _FAULTS if fault.pattern.search(text) or codes & fault.codes)
    return next(faults, None)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])
