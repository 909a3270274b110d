"""What the runtime says, and what is made of it."""

from __future__ import annotations

import pytest

from djl_python_neuronx.backends.tnx.errors import of_load, of_step
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendError,
    BackendUnavailableError,
    CompileError,
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
        (RuntimeError(NO_START), BackendUnavailableError, "another process holds the cores"),
        (RuntimeError("NRT_FAILURE in nrt_init()"), BackendUnavailableError, "the driver is missing"),
        (RuntimeError("nrt_load status=9"), BackendUnavailableError, "tensor_parallel_degree"),
        (RuntimeError("Could not open the nd1"), BackendUnavailableError, "NEURON_RT_NUM_CORES"),
        (RuntimeError("nrt_load_collectives status=2"), BackendError, "djl-neuronx check"),
        (RuntimeError("[NRT_INVALID_HANDLE] status_code=3"), BackendUnavailableError, "start it again"),
        (RuntimeError("nrt_load status=6"), BackendUnavailableError, "replace the instance"),
        (RuntimeError("NEFF version mismatch supported: 1.1 received: 2.0"), ArtifactError, "image"),
        (RuntimeError(CORES), BackendUnavailableError, "tensor_parallel_degree"),
        (RuntimeError("nrt_load: 4 NeuronCores are required, but 2 are visible"), BackendUnavailableError, "4"),
        (RuntimeError(BUSY), BackendUnavailableError, "neuron-ls"),
        (FileNotFoundError("Could not find a matching NEFF for your HLO"), ArtifactError, "again"),
        (RuntimeError("nrt_load status=10"), ArtifactError, "compiler of this image"),
        (RuntimeError("neuronx-cc failed with 70\nlast line"), CompileError, "last line"),
        (RuntimeError("neuronx-cc failed with exit status 4"), CompileError, "exit status 4"),
        (RuntimeError("neuronx-cc failed with exit status 6"), CompileError, "exit status 6"),
        (RuntimeError("neuronx-cc killed, exit status: 9"), CompileError, "exit status: 9"),
        (FileNotFoundError(2, "none", "/m/compiled/model.safetensors"), BackendError, "FileNotFound"),
        (RuntimeError("size mismatch in /var/neuron-compile-cache/x"), BackendError, "size mismatch"),
        (AssertionError("odd"), BackendError, "AssertionError: odd"),
        (ArtifactError("ours"), ArtifactError, "ours"),
    ],
)  # fmt: skip
def test_of_load(error: Exception, kind: type[ServingError], words: str) -> None:
    found = of_load(error, "the model in /m")
    assert type(found) is kind
    assert words in str(found)


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
        (DeviceMemoryError("ours"), DeviceMemoryError, False),
    ],
)
def test_of_step(error: Exception, kind: type[BackendError], fatal: bool) -> None:
    found = of_step(error, "a decode step of 2 rows")
    assert type(found) is kind
    assert found.fatal is fatal


def test_a_long_log_keeps_its_end() -> None:
    found = of_load(RuntimeError("neuronx-cc\n" * 500 + "the reason"), "the model")
    assert str(found).endswith("the reason")
    assert len(str(found)) < 400
