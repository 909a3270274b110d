"""Translation of errors of the Neuron compiler, the runtime and the libraries above them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
    CompileError,
    CoresTakenError,
    DeviceMemoryError,
    ServingError,
    StepError,
)

_TAIL_LINES = 15
_LINE_LENGTH = 400
_COMPILER_LOG = "log-neuron-cc.txt"
_COMPILER = re.compile(
    r"neuronx?-cc\b|\bcompil(?:er|ation|ing)\b.{0,40}\b(?:fail|error|status)|process pool was terminated",
    re.IGNORECASE,
)
# Source: users' reports of compiles that the kernel has killed, Python's texts for a child that a signal has ended
# (subprocess, concurrent.futures), and that of C++ for an allocation that fails.
_KILLED = re.compile(
    r"SIGKILL|\bF137\b|(?:^|(?:neuronx-cc|was|forcibly|error:) )killed\b|terminated abruptly|bad_alloc|MemoryError"
    r"|(?:code|status|failed with)[=: ]*(?:-9|137)\b",
    re.IGNORECASE | re.MULTILINE,
)
# Codes of the compiler's own errors (`NCC_IXCG856`, `XCG863`, `F134`). It ends with status 70, and calls it an internal
# compiler error, whatever the exception.
_REFUSED = re.compile(r"\[(?:NCC_)?[A-Z]+\d{3}\]|NCC_[A-Z]+\d{3}", re.IGNORECASE)
# Errors of Python, and the texts of the C library for errors of the system.
_OF_MACHINE = re.compile(
    r"\[Errno \d+\]|(?:Import|ModuleNotFound)Error|cannot open shared object|SIG(?:TERM|INT)\b|no space left"
    r"|\bENOSPC\b|quota exceeded|permission denied|operation not permitted|too many open files|input/output error"
    r"|resource temporarily unavailable|read-only file system|no such file or directory",
    re.IGNORECASE,
)
"""Failures that another machine, or a later attempt, need not have."""


_Kind = Literal["memory", "cores", "taken", "busy", "lost", "neff", "version", "invalid", "compile"]


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
        r"no matching NEFF|find a matching NEFF|not found in input_shape_map|exceeds largest bucket|"
        r"longer than max_(?:context_)?length",
        "neff",
        "Compile it again with these options, or serve with those that it was compiled with",
    ),
    _fault(
        r"NRT_UNSUPPORTED_NEFF_VERSION|NEFF version mismatch|Unknown type name '__torch__\.torch\.classes\.neuron",
        "version",
        "Compile it again with the compiler of this image",
        codes={10},
    ),
    _fault(
        r"PytorchStreamReader failed|deserializing header",
        "neff",
        "A file of it is damaged or incomplete: copy or compile it again",
    ),
    # A compile that was killed leaves an entry too.
    _fault(
        r"cached failed neff",
        "compile",
        "An earlier compile failed or was interrupted, and the compiler's cache repeats its result: remove the folder "
        "MODULE_... that it names",
    ),
    # `ret=-16` (EBUSY) comes also if two processes take cores of one chip within milliseconds: either fails.
    _fault(
        r"cores?\(?s?\)? not available|device or resource busy|\bEBUSY\b|\bcores busy\b|in use by (?:another )?process",
        "taken",
        "End the process that holds the cores (neuron-ls shows it), choose others with NEURON_RT_VISIBLE_CORES, or "
        "lower tensor_parallel_degree if the machine has fewer",
    ),
    _fault(
        r"NRT_LOAD_NOT_ENOUGH_NC|NeuronCores? (?:are|is) required|could not open the nd\d",
        "cores",
        "Lower tensor_parallel_degree, give the process more cores (NEURON_RT_NUM_CORES, NEURON_RT_VISIBLE_CORES), or "
        "end the process that holds them (neuron-ls shows it)",
        codes={9},
    ),
    _fault(
        r"neuron driver version|no neuron device available",
        "lost",
        "The driver is missing or does not fit the runtime, or the devices are not passed to the container: "
        "djl-neuronx doctor shows which",
    ),
    # The whole message of torch-neuronx if the runtime fails to start; the reason is in the runtime's log.
    _fault(
        r"runtime (?:could not|cannot) be initialized|in nrt_init\b",
        "taken",
        "The runtime's log, just before this, has the reason: another process holds the cores (neuron-ls shows it; end "
        "it, or choose others with NEURON_RT_VISIBLE_CORES), the machine has fewer cores, or the driver is missing or "
        "too old",
    ),
    _fault(
        r"NRT_EXEC_NC_BUSY",
        "busy",
        "Another model or thread of this process runs on the core: serve each model from its own process",
        codes={1005},
    ),
    _HOST_MEMORY,
    _fault(
        r"NRT_RESOURCE|RESOURCE_EXHAUSTED|allocation failure|out of memory|failed to alloc|allocate memory|NCC_EOOM|"
        r"peak HBM usage",
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

_ERRORS: Mapping[_Kind, type[ServingError]] = {
    "memory": DeviceMemoryError,
    "taken": CoresTakenError,
    "neff": ArtifactError,
    "version": ArtifactError,
    "invalid": BackendError,
    "compile": CompileError,
}
"""The errors of loads; of all others a `BackendUnavailableError`."""


def of_load(error: Exception, what: str, work_dir: Path | None = None) -> ServingError:
    """Return the `ServingError` for an error of a load or a compilation.

    `what` names the model. `work_dir`: the compiler's, if it keeps its logs there.
    """
    if isinstance(error, ServingError):
        return error
    text, fault = _describe(error), _find(error)
    output = f"{type(error).__name__}: {error}"
    if fault is None:
        if isinstance(error, FileNotFoundError):
            return ArtifactNotFoundError(
                f"{what} cannot be loaded, a file is missing: {text}. Copy or fetch it again"
            )
        if (failed := _failed_compile(error, what, output, work_dir)) is not None:
            return failed
        refused = isinstance(error, AssertionError)
        advice = (
            ". The library refuses the arguments: change the options behind them" if refused else ""
        )
        return BackendError(f"{what} cannot be loaded: {type(error).__name__}: {text}{advice}")
    message = f"{what} cannot be loaded: {text}. {fault.advice}"
    found = _ERRORS.get(fault.kind, BackendUnavailableError)(message)
    if isinstance(found, DeviceMemoryError):
        refused = _REFUSED.search(output) is not None
        _judge(found, f"{output}\n{_log(work_dir)[1]}", refused=refused)
    return found


def _failed_compile(
    error: Exception, what: str, output: str, work_dir: Path | None
) -> CompileError | None:
    """Return the error of a compiler that failed; None if `error` is another's."""
    # Its table of versions and their parser, which no other start needs.
    from djl_python_neuronx.planning.defects import recognised

    name, whole = _log(work_dir)
    log = f"{name}:\n{_tail(whole)}" if name else _describe(error)
    end = f"{output}\n{log}"
    row = recognised(end)
    if isinstance(error, OSError) or not (row or _COMPILER.search(_describe(error))):
        return None
    known = f"; {row.report}" if row else ""
    failed = CompileError(f"{what} does not compile{known}. The end of the log:\n{log}")
    refused = row is not None or _REFUSED.search(end) is not None
    _judge(failed, f"{output}\n{whole}", refused=refused)
    return failed


def _judge(failed: BackendError, output: str, *, refused: bool) -> None:
    """Set `host_full` and `lasting` of an error by all that the compiler wrote, if it refused the graph."""
    failed.host_full = any(one.search(output) for one in (_KILLED, _HOST_MEMORY.pattern))
    failed.lasting = refused and not failed.host_full and not _OF_MACHINE.search(output)


def of_step(error: Exception, what: str) -> BackendError:
    """Return the `BackendError` for an error of a device call; `fatal` if no further call can succeed."""
    if isinstance(error, BackendError):
        return error
    text, fault = _describe(error), _find(error)
    if fault is None:
        return StepError(f"{what} failed: {type(error).__name__}: {text}")
    message = f"{what} failed: {text}. {fault.advice}"
    translated = DeviceMemoryError(message) if fault.kind == "memory" else StepError(message)
    translated.fatal = fault.kind in {"cores", "taken", "lost"}
    return translated


def _find(error: Exception) -> _Fault | None:
    if isinstance(error, MemoryError):
        return _HOST_MEMORY
    text = str(error)
    codes = {int(found["code"]) for found in _STATUS.finditer(text)}
    of_file = isinstance(error, OSError) and error.filename is not None  # such as a busy one on NFS
    faults = (
        fault
        for fault in _FAULTS
        if (fault.pattern.search(text) or codes & fault.codes)
        and not (of_file and fault.kind == "taken")
    )
    return next(faults, None)


def _describe(error: Exception) -> str:
    """Return the end of an error's text, without a full stop, and the line that raised it if that explains more."""
    text = _tail(str(error)).removesuffix(".")
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (isinstance(error, AssertionError) or not text):
        return text
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
    return f"{text} ({place})" if text else place


def _log(work_dir: Path | None) -> tuple[str, str]:
    """Return name and text of the newest log of the compiler below `work_dir` that has an error; empty if none has."""
    if work_dir is None:
        return "", ""
    texts = {log: log.read_text(errors="replace") for log in work_dir.rglob(_COMPILER_LOG)}
    failed = [log for log, text in texts.items() if "ERROR" in text]
    if not failed:
        return "", ""
    newest = max(failed, key=lambda log: log.stat().st_mtime)
    return str(newest.relative_to(work_dir)), texts[newest]


def _tail(text: str) -> str:
    lines = text.strip().splitlines()[-_TAIL_LINES:]
    return "\n".join(
        f"{line[:_LINE_LENGTH]}…" if len(line) > _LINE_LENGTH else line for line in lines
    )
