"""Modules of models that lie outside NxD Inference: their names have the digest of the source that they are made of.

They are imported from the bytes that were hashed, so a file that is exchanged meanwhile is never run. An import by
name, as of a pickled class in another process, gives the same code or an error: this package adds the finder, and the
folder is in the environment while the library works.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from djl_python_neuronx.artifacts import model_code
from djl_python_neuronx.artifacts.model_code import ModelCode
from djl_python_neuronx.backends import env
from djl_python_neuronx.backends.nxdi.contrib.fixes import FIXES
from djl_python_neuronx.planning.nxdi.contrib import row_of

VARIABLE = "DJL_NEURONX_MODEL_CODE"
"""The folder of the code, for processes that the library starts."""
_PREFIX = f"{__name__}.m"
_codes: dict[str, ModelCode] = {}


def register(folder: Path, digest: str) -> ModelCode:
    """Read the code in a folder, for the modules below the package `package_of` it.

    Raises:
        ArtifactError: it has another digest, or cannot be read.
    """
    if digest not in _codes:
        _codes[digest] = model_code.read_as(folder, digest)
    return _codes[digest]


def package_of(digest: str) -> str:
    """Return the name of the package that has the modules of a digest."""
    return f"{_PREFIX}{digest}"


@dataclass(frozen=True)
class _Source(InspectLoader):
    """The loader of one module."""

    digest: str
    content: bytes
    path: Path

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return self.content.decode()

    def get_code(self, fullname: str) -> Any:  # noqa: ANN401, ARG002
        return self.source_to_code(self.content, str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        row = row_of(self.digest)
        if row.fix and self.path.stem.startswith("modeling_"):
            FIXES[row.fix](module)


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        digest, _, name = fullname.removeprefix(_PREFIX).partition(".")
        folder = env.value(VARIABLE)
        if digest not in _codes and folder is None:
            return None
        code = register(Path(folder or ""), digest)
        file = name.replace(".", "/")
        inner = f"{file}/" if file else ""
        is_package = any(each.startswith(inner) for each in code.files)
        found = f"{inner}__init__.py" if is_package else f"{file}.py"
        if not is_package and found not in code.files:
            return None
        # The folder's own `__init__.py` is not run: some import what their folder lacks.
        content = code.files.get(found, b"") if file else b""
        loader = _Source(digest, content, code.folder / model_code.SOURCE / found)
        # Not spec_from_file_location: Python's own finder would take a package's modules from its folder, unhashed.
        spec = ModuleSpec(fullname, loader, origin=str(loader.path), is_package=is_package)
        spec.has_location = True
        return spec


sys.meta_path.append(_Finder())
