"""Risks of a compile that is to come: defects of the compiler that users report, and the host's memory."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import names_where
from djl_python_neuronx.config.sources import FILE_NAME, try_path
from djl_python_neuronx.config.values import as_property
from djl_python_neuronx.errors import BackendError, BackendUnavailableError
from djl_python_neuronx.loading.pinned import pinned
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.machines import GIB
from djl_python_neuronx.planning.memory import CompileMemory

_LOCAL = names_where(lambda marker: marker.output == "local") - {"model_id", "revision"}


def compile_risks(prepared: Prepared) -> Iterator[Finding]:
    """Yield what may end a compile of a prepared model, which needs one: each with the way around it."""
    from djl_python_neuronx.planning.defects import known_defects  # see faults.py

    version = None
    compiler = backends.compiler(prepared.backend)
    with suppress(BackendUnavailableError):
        version = compiler and compiler.compiler_version()
    yield from known_defects(prepared.case, version or None)
    needed, there = prepared.compile_memory, prepared.compile_host_bytes
    if needed is not None and there is not None and needed.most > there:
        can = "may not fit" if needed.least <= there else "cannot fit"
        problem = f"{_advice(prepared, needed)} With {there / GIB:.1f} GiB of host memory it {can}"
        yield Finding((), problem, "warning" if needed.least > there else "note")


@contextmanager
def explained(prepared: Prepared) -> Iterator[None]:
    """Add the memory that a compile takes, and where to compile, to an error of a full host in the block."""
    try:
        yield
    except BackendError as error:
        needed = prepared.compile_memory
        if error.host_full and needed is not None:
            error.args = (f"{error}\n{_advice(prepared, needed)}",)
        raise


def _advice(prepared: Prepared, needed: CompileMemory) -> str:
    """Return the memory that a compile takes, and the command that compiles the same plan on another machine."""
    folder, name = prepared.options.model_dir, prepared.machine.instance_type
    chosen = {"model_loader", *prepared.resolved.origins} - _LOCAL
    options = {one: value for one, value in pinned(prepared).items() if one in chosen}
    target: object = folder
    if folder is None or not try_path((folder / FILE_NAME).is_file, failed=False):
        target = fetch.local_folder(prepared.name, folder) or prepared.name
        options.pop("model_id", None)
    words = ["djl-neuronx", "compile", str(target), "--output", "DIR"]
    words += ["--instance", name] if name else []
    for one, value in options.items():
        words += ["-o", f"{one}={as_property(value)}"]
    device = "needs a Neuron device" if prepared.backend == "tnx" else "needs no Neuron device"
    return (
        f"A compile takes {needed.least / GIB:.1f} to {needed.most / GIB:.1f} GiB of the host's memory by an estimate: "
        f"run `{shlex.join(words)}` on a machine that has it (it {device}), and serve DIR."
    )
