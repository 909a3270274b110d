"""Fixes of models that lie outside NxD Inference, from outside: each changes a module right after its import.

A row of planning/nxdi/contrib.toml names its fix. The text of a fix is part of the compile key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Final

Fix = Callable[[ModuleType], None]

FIXES: Final[Mapping[str, Fix]] = MappingProxyType({})
"""Name to fix."""
