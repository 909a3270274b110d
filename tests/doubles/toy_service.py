"""A service over a backend that the test holds: its engine runs on a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.speculation import Proposer
from djl_python_neuronx.engine.worker import EngineThread, WorkerSettings
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.service import Service
from djl_python_neuronx.types import Tokenizer
from tests.doubles.toy_tokenizer import TOKENIZER


def toy_service(
    *backends: Backend | Callable[[], Backend],
    tokenizer: Tokenizer = TOKENIZER,
    proposer: Proposer | None = None,
    warm_up: bool = False,
    on_death: Callable[[ServingError], None] = lambda _error: None,
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    adapters: Mapping[str, Path] = MappingProxyType({}),
    before: Service | None = None,
    **settings: Any,
) -> Service:
    """`backends`: of each copy one, or what makes one at a start. `functions`: of `model.py`. `settings`: options.

    `adapters`: those that toy backends have at the start.
    """
    options = ServingOptions(model_id="toy", **settings)

    def load(backend: Backend | Callable[[], Backend]) -> Engine:
        made: Any = backend() if callable(backend) else backend
        if adapters:
            made.adapters.update(enumerate(adapters.values(), 1))
        return Engine(
            made,
            decode_interleave=options.decode_interleave,
            max_join_wait_s=options.max_join_wait_ms / 1000,
            proposer=proposer,
        )

    worker = WorkerSettings(
        options.queue_timeout or options.predict_timeout, warm_up, len(adapters)
    )
    return Service(
        options,
        lambda: tokenizer,
        [partial(EngineThread, partial(load, backend), worker) for backend in backends],
        functions=functions,
        adapters=adapters,
        fetch_adapter=lambda _name, source: Path(source),
        before=before,
        on_death=on_death,
    )
