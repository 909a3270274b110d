"""A device that only waits: no model runs, and answers are made up. For load tests of clients and of the server."""

from __future__ import annotations

from pathlib import Path

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.plan import LoadPlan


def load(plan: LoadPlan, compiled: Path | None = None) -> Backend:  # noqa: ARG001
    """Make a device of the plan's shapes; see `backend.load`. Reads config.json, and no weights."""
    from djl_python_neuronx.backends.sim import backend

    return backend.load(plan)
