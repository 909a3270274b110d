"""Messages of the compiler, the runtime and the libraries, and our errors for them."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from djl_python_neuronx.backends.faults import of_load, of_step
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

MEMORY = "nrt_tensor_allocate status=4 message=NRT_RESOURCE: failed to allocate 2147483648 bytes"
# As users of these libraries report them.
ALLOCATION = 'nrt_load_collectives status=4 message="Allocation Failure"'
NO_START = "The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged to your system logs."
CORES = "Logical Neuron Core(s) not available - Requested:lnc8-lnc8 Available:0"
BUSY = "TDRV: failed to open /dev/neuron0: Device or resource busy"
LOST = "nrt_execute status=1202 message=NRT_EXEC_HW_ERR_NC_UE"
SHAPES = (
    "Input shape ['[1, 9]'] not found in input_shape_map: dict_keys([" + "'[1, 8]', " * 900 + "])"
)
TOO_LONG = "Inputs supplied (9 tokens) are longer than max_context_length (8 tokens)."
ZIP = "PytorchStreamReader failed reading zip archive: failed finding central directory"
CLASS = "Unknown type name '__torch__.torch.classes.neuron.SPMDModel':"
CACHED = "Got a cached failed neff at /cache/MODULE_1/model.neff. Will skip compilation"
NUMBERS = "nrt_execute status=1003 message=NRT_EXEC_COMPLETED_WITH_NUM_ERR"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError(MEMORY), DeviceMemoryError, "max_rolling_batch_size"),
        (RuntimeError(ALLOCATION), DeviceMemoryError, "max_rolling_batch_size"),
        (RuntimeError("nrt_tensor_allocate status=4"), DeviceMemoryError, "max_rolling_batch_size"),
        (RuntimeError("Could not load the model status=4"), DeviceMemoryError, "max_rolling"),
        (MemoryError(), DeviceMemoryError, "host is out of memory"),
        (OSError(12, "Cannot allocate memory"), DeviceMemoryError, "host is out of memory"),
        (RuntimeError("nrt_load status=11"), DeviceMemoryError, "host is out of memory"),
        (RuntimeError(NO_START), CoresTakenError, "another process holds the cores"),
        (RuntimeError("NRT_FAILURE in nrt_init()"), CoresTakenError, "the driver is missing"),
        (RuntimeError("nrt_load status=9"), BackendUnavailableError, "tensor_parallel_degree"),
        (RuntimeError("Could not open the nd1"), BackendUnavailableError, "NEURON_RT_NUM_CORES"),
        (RuntimeError("nrt_load_collectives status=2"), BackendError, "djl-neuronx check"),
        (RuntimeError("[NRT_INVALID_HANDLE] status_code=3"), BackendUnavailableError, "start it again"),
        (RuntimeError("nrt_load status=6"), BackendUnavailableError, "replace the instance"),
        (RuntimeError("NEFF version mismatch supported: 1.1 received: 2.0"), ArtifactError, "image"),
        (RuntimeError("nrt_init: no neuron device available"), BackendUnavailableError, "doctor"),
        (RuntimeError(f"Neuron driver version 2.10 is not supported. {NO_START}"), BackendUnavailableError, "doctor"),
        (OSError(16, "Device or resource busy", "/m/.nfs01"), BackendError, "/m/.nfs01"),
        (OSError(16, "Device or resource busy"), CoresTakenError, "neuron-ls"),
        (RuntimeError(CORES), CoresTakenError, "tensor_parallel_degree"),
        (RuntimeError("nrt_load: 4 NeuronCores are required, but 2 are visible"), BackendUnavailableError, "4"),
        (RuntimeError(BUSY), CoresTakenError, "neuron-ls"),
        (RuntimeError("nrt_init: reserving failed (cores busy, ret=-16)"), CoresTakenError, "neuron-ls"),
        (FileNotFoundError("Could not find a matching NEFF for your HLO"), ArtifactError, "again"),
        (RuntimeError("nrt_load status=10"), ArtifactError, "compiler of this image"),
        (RuntimeError("neuronx-cc failed with 70\nlast line"), CompileError, "last line"),
        (RuntimeError("neuronx-cc failed with exit status 4"), CompileError, "exit status 4"),
        (RuntimeError("neuronx-cc failed with exit status 6"), CompileError, "exit status 6"),
        (RuntimeError("neuronx-cc killed, exit status: 9"), CompileError, "exit status: 9"),
        (FileNotFoundError(2, "none", "/m/compiled/model.safetensors"), ArtifactNotFoundError, "/m/compiled/"),
        (ValueError(SHAPES), ArtifactError, "Compile it again with these options"),
        (RuntimeError(ZIP), ArtifactError, "damaged"),
        (RuntimeError(CLASS), ArtifactError, "compiler of this image"),
        (RuntimeError(CACHED), CompileError, "remove the folder MODULE_"),
        (RuntimeError("[NCC_EOOM001] The combined memory exceeds the limit"), DeviceMemoryError, "n_positions"),
        (RuntimeError("size mismatch in /var/neuron-compile-cache/x"), BackendError, "size mismatch"),
        (AssertionError("odd"), BackendError, "AssertionError: odd"),
        (ArtifactError("ours"), ArtifactError, "ours"),
    ],
)  # fmt: skip
def test_of_load(error: Exception, kind: type[ServingError], words: str) -> None:
    found = of_load(error, "the model in /m")
    assert type(found) is kind
    assert words in str(found)
    assert not re.search(r"\.\. [A-Z]", str(found))


@pytest.mark.parametrize(
    ("error", "kind", "fatal"),
    [
        (RuntimeError(MEMORY), DeviceMemoryError, False),
        (RuntimeError(LOST), StepError, True),
        (RuntimeError("NRT_CLOSED"), StepError, True),
        (RuntimeError("nrt_execute status=5"), StepError, True),
        (RuntimeError("nrt_execute status=3"), StepError, True),
        (RuntimeError("nrt_execute: status=101"), StepError, True),
        (RuntimeError("nrt_execute status=1204"), StepError, True),
        (RuntimeError("NRT_EXEC_SW_NQ_OVERFLOW"), StepError, True),
        (RuntimeError("NRT_EXEC_UNIT_DISABLED"), StepError, True),
        (RuntimeError(BUSY), StepError, True),
        (RuntimeError("nrt_execute status=1005"), StepError, False),
        (RuntimeError("NRT_EXEC_NC_BUSY"), StepError, False),
        (RuntimeError("nrt_execute status=7 message=NRT_QUEUE_FULL"), StepError, False),
        (RuntimeError("nrt_execute status=1006"), StepError, False),
        (RuntimeError("nrt_execute status=2"), StepError, False),
        (RuntimeError(NUMBERS), StepError, False),
        (KeyError((20, 4)), StepError, False),
        (ValueError(SHAPES), StepError, False),
        (ValueError(TOO_LONG), StepError, False),
        (DeviceMemoryError("ours"), DeviceMemoryError, False),
    ],
)
def test_of_step(error: Exception, kind: type[BackendError], fatal: bool) -> None:
    found = of_step(error, "a decode step of 2 rows")
    assert type(found) is kind
    assert found.fatal is fatal
    assert not re.search(r"\.\. [A-Z]", str(found))


def test_a_long_log_keeps_its_end() -> None:
    found = of_load(RuntimeError("neuronx-cc\n" * 500 + "the reason"), "the model")
    assert str(found).endswith("the reason")
    assert len(str(found)) < 400


def test_a_long_line_keeps_its_beginning() -> None:
    found = str(of_step(ValueError(SHAPES), "a decode step of 2 rows"))
    assert "failed: Input shape ['[1, 9]'] not found in input_shape_map" in found
    assert len(found) < 700


# What users' compiles ended with, whether memory of the host did it, and whether the same compile fails again.
ENDS = [
    (RuntimeError("neuronx-cc failed with -9"), True, False),
    (RuntimeError("[F137] neuronx-cc was forcibly killed - insufficient system memory"), True, False),
    (RuntimeError("neuronx-cc: Backend exited with code -9 and stderr:"), True, False),
    (subprocess.CalledProcessError(-9, ["neuronx-cc"]), True, False),
    (BrokenProcessPool("A process in the process pool was terminated abruptly"), True, False),
    (RuntimeError("neuronx-cc: terminate called after throwing an instance of 'std::bad_alloc'"), True, False),
    (RuntimeError("Failed compilation with ['neuronx-cc']: [NCC_IXCG856] MATCH_REPLACE8"), False, True),
    (RuntimeError("Failed compilation: Too many instructions after unroll for function sg0000"), False, True),
    (RuntimeError("neuronx-cc failed with 70"), False, False),
    (RuntimeError("neuronx-cc failed with status 70: OSError: [Errno 12] Cannot allocate memory"), True, False),
    (RuntimeError("neuronx-cc exited with 70 [NCC_ITEN404]: failed to alloc a host buffer: ENOMEM"), True, False),
    (RuntimeError("[F134] neuronx-cc terminated abnormally"), False, True),
    (RuntimeError("neuronx-cc failed with 1"), False, False),
    (RuntimeError("[XCG815] Estimated peak HBM usage (19.0) exceeds 16GB"), False, True),
    (RuntimeError("[NCC_EOOM001] neuronx-cc: the combined memory exceeds the limit"), False, True),
    (RuntimeError("neuronx-cc [NCC_X001]: No space left on device"), False, False),
    (subprocess.CalledProcessError(-15, ["neuronx-cc"]), False, False),
    (RuntimeError("neuronx-cc: libxml2.so.2: cannot open shared object file"), False, False),
    (RuntimeError(CACHED), False, False),
    (MemoryError(), True, False),
    (RuntimeError(MEMORY), False, False),
    (RuntimeError(BUSY), False, False),
]  # fmt: skip


def test_how_a_compile_ended() -> None:
    wrong = []
    for error, full, lasting in ENDS:
        found = of_load(error, "the model in /m")
        assert isinstance(found, BackendError)
        if (found.host_full, found.lasting) != (full, lasting):
            wrong.append((error, found.host_full, found.lasting))
    assert not wrong


REFUSED = "ERROR: [INTERNAL_ERROR] [NCC_ITEN404] An Internal Compiler Error has occurred\nexited with code=70"
# Lines at the beginning of a log, and whether memory of the host did it; then come `REFUSED` and lines before it.
OF_MACHINE = [
    ("ERROR: OSError: [Errno 24] Too many open files", False),
    ("ERROR: BlockingIOError: [Errno 11] Resource temporarily unavailable", False),
    ("ERROR: /tmp/x: Read-only file system", False),
    ("ERROR: OSError: [Errno 28] No space left on device", False),
    ("ERROR: OSError: [Errno 5] Input/output error", False),
    ("ERROR: ModuleNotFoundError: No module named 'networkx'", False),
    ("ERROR: walrus: cannot read a/x.hlo: No such file or directory", False),
    ("ERROR: walrus was Killed", True),
    ("ERROR: walrus exited with code=-9", True),
    ("ERROR: fork: Cannot allocate memory", True),
]


def test_a_log_with_a_sign_of_the_machine_anywhere_is_no_refusal(tmp_path: Path) -> None:
    error = RuntimeError("Failed compilation with ['neuronx-cc', 'compile']")
    large = RuntimeError("[NCC_EOOM001] neuronx-cc: the combined memory exceeds the limit")
    log = tmp_path / "log-neuron-cc.txt"
    frames = "\nERROR   at frame of 137 values" * 20
    log.write_text(f"INFO 12 stores killed{frames}\n{REFUSED}")
    refused = [of_load(one, "the model in /m", tmp_path) for one in (error, large)]
    wrong = [one for one in refused if not one.lasting or one.host_full]
    for sign, full in OF_MACHINE:
        log.write_text(f"{sign}{frames}\n{REFUSED}")
        ended = [of_load(one, "the model in /m", tmp_path) for one in (error, large)]
        wrong += [one for one in ended if (one.host_full, one.lasting) != (full, False)]
    assert not wrong


def test_a_failed_compile_that_users_report_names_the_report() -> None:
    error = RuntimeError("Failed compilation with ['neuronx-cc']: [NCC_IXCG856] MATCH_REPLACE8")
    found = of_load(error, "the model in /m")
    assert type(found) is CompileError
    assert "users of neuronx-cc >=2.23 report that" in str(found)
    assert "leave on_device_generation out" in str(found)
    assert "https://github.com/aws-neuron/aws-neuron-sdk/issues/1303" in str(found)


def test_an_assertion_without_words_names_its_line() -> None:
    try:
        assert not Path(), ""
    except AssertionError as error:
        found = str(of_load(error, "the model in /m"))
    assert "test_faults.py" in found
    assert "assert not Path()" in found
    assert "change the options" in found


def test_a_failed_compile_ends_with_the_lines_of_the_graph_that_failed(tmp_path: Path) -> None:
    for name, text in (
        ("_tp0_bk0", "finished"),
        ("_tp0_bk1", "ERROR [NCC] too many\nthe reason"),
        ("_tp0_bk2", "run"),
    ):
        (tmp_path / "context_encoding_model" / name).mkdir(parents=True)
        (tmp_path / "context_encoding_model" / name / "log-neuron-cc.txt").write_text(text)
    error = RuntimeError("Failed compilation with ['neuronx-cc', 'compile']")
    found = of_load(error, "the model in /m", tmp_path)
    assert type(found) is CompileError
    assert str(found).endswith(
        "context_encoding_model/_tp0_bk1/log-neuron-cc.txt:\nERROR [NCC] too many\nthe reason"
    )
    assert "Failed compilation with" in str(of_load(error, "the model in /m", tmp_path / "none"))
