"""An entry point for `djl_peer`: the handler as it is, on the toy backend unless `model_id` names a model.

Knobs come as properties `toy_*`. SIGUSR1 makes the process print what is in use, SIGUSR2 lets a hanging toy go on.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

from djl_python_neuronx import djl_process, errors, handler
from djl_python_neuronx.service import Service
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service

load_model = Service.load
_backends = []


def load(properties, model_dir, *, on_death=None):
    """In place of `Service.load`."""
    if "model_id" in properties:
        return load_model(properties, model_dir, on_death=on_death)
    time.sleep(float(properties.get("toy_load_s", 0)))
    if "toy_load_error" in properties:
        raise getattr(errors, properties["toy_load_error"])("two lines\nof one problem")
    timeout_s = float(properties.get("predict_timeout", 120))
    djl_process.METRICS_S = float(properties.get("toy_metrics_s", djl_process.METRICS_S))
    spec = dataclasses.replace(TOY_SPEC, num_slots=int(properties.get("toy_slots", 4)))
    step_s = float(properties.get("toy_step_s", 0))
    _backends[:] = [
        ToyBackend(spec, step_s=step_s) for _ in range(int(properties.get("replicas", 1)))
    ]
    hung = Path(properties.get("toy_hung", ""))
    if "toy_hang_at" in properties and not hung.exists():
        # Only the first process hangs: the one after it must serve.
        hung.touch()
        _backends[0].hang_at.add(int(properties["toy_hang_at"]))
    return toy_service(*_backends, on_death=on_death, predict_timeout=timeout_s)


Service.load = staticmethod(load)


def usage():
    """Everything that is in use."""
    service, door = djl_process._process.service, djl_process._process.door
    return {
        "rows": getattr(door, "num_rows", 0),
        "streams": len(service.loop.streams),
        "running": service.loop.state.running,
        "waiting": service.loop.state.waiting,
        "slots": sum(len(backend.acquired) for backend in _backends),
        "violations": [broken for backend in _backends for broken in backend.violations],
    }


signal.signal(signal.SIGUSR1, lambda *_: print("usage", usage(), flush=True))  # noqa: T201
signal.signal(signal.SIGUSR2, lambda *_: _backends[0].resume.set())
handle = handler.handle
