"""Risks of a compile that is to come: defects of the compiler that users report, and the host's memory."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from djl_python_neuronx import backends
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.values import as_property
from djl_python_neuronx.errors import BackendError, BackendUnavailableError
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.defects import known_defects
from djl_python_neuronx.planning.machines import GIB, INSTANCES


def compile_risks(prepared: Prepared) -> Iterator[Finding]:
    """Yield what may end a compile of a prepared model, which needs one: each with the way around it."""
    version = None
    compiler = backends.compiler(prepared.backend)
    with suppress(BackendUnavailableError):
        version = compiler and compiler.compiler_version()
    yield from known_defects(prepared.case, version or None)
    needed, there = prepared.compile_memory, prepared.compile_host_bytes
    if needed is not None and there is not None and needed.most > there:
        can = "may not fit" if needed.least <= there else "cannot fit"
        problem = (
            f"a compile takes {_gib(needed.least)} to {_gib(needed.most)} GiB of the host's memory, by an estimate: "
            f"with {_gib(there)} it {can}. {_elsewhere(prepared, needed.most)}"
        )
        yield Finding((), problem, "warning" if needed.least > there else "note")


@contextmanager
def explained(prepared: Prepared) -> Iterator[None]:
    """Add the memory that a compile takes, and where to compile, to an error of a full host in the block."""
    try:
        yield
    except BackendError as error:
        needed = prepared.compile_memory
        if error.host_full and needed is not None:
            size = f"{_gib(needed.least)} to {_gib(needed.most)} GiB"
            advice = (
                f"Such a compile takes {size}, by an estimate. {_elsewhere(prepared, needed.most)}"
            )
            error.args = (f"{error}\n{advice}",)
        raise


def _elsewhere(prepared: Prepared, size: int) -> str:
    """Return the advice to compile on a machine with `size` bytes of memory, with the command."""
    family, name = prepared.machine.family, prepared.machine.instance_type
    where = "a machine with so much memory, which needs no Neuron device,"
    if prepared.backend == "tnx":
        large = [
            one.name
            for one in INSTANCES.values()
            if one.family == family and one.host_memory_gib * GIB > size
        ]
        where = large[0] if large else "a Neuron machine with more memory"
    origins, options = prepared.resolved.origins, prepared.options
    given = [
        f"-o {one}={as_property(getattr(options, one))}"
        for one, origin in origins.items()
        if origin == sources.COMMAND_LINE and one not in {"model_id", "retry_compile"}
    ]
    words = ["djl-neuronx", "compile", prepared.name, "--output", "DIR"]
    words += ["--instance", name] if name else []
    return f"Compile it on {where} with `{shlex.join([*words])}{''.join(f' {one}' for one in given)}` and serve DIR"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
