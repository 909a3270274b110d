"""The composition root: settings → artifact → backend → engine → `Service`, which every request handler is given."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts.folder import file_names, reading
from djl_python_neuronx.backends.holders import once_free
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.engine.adapters import Adapters
from djl_python_neuronx.engine.limits import longest_prompt, most_characters, with_defaults
from djl_python_neuronx.engine.loop import JOIN_S, Host, LoopSettings
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.loading.adapters import fetch_allowed
from djl_python_neuronx.loading.launch import make_launch
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import SILENT, LoadProgress
from djl_python_neuronx.loading.targets import find_target
from djl_python_neuronx.loading.tokenizer_process import MOST_SLOW
from djl_python_neuronx.protocol import custom, parse_body
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest, Threads, client_label
from djl_python_neuronx.telemetry import Metrics, Recorder
from djl_python_neuronx.tracing import Tracing
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

TEXT_THREADS = MOST_SLOW + 4
"""Requests of a model that are parsed at once. Others wait, as many as the engines take; for slow ones, which leave
four threads, no longer than `SLOW_S` each."""


class Service:
    """A loaded model that answers requests."""

    def __init__(
        self,
        options: ServingOptions,
        tokenizer: Callable[[], Tokenizer],
        launches: Sequence[Callable[[], Host]],
        *,
        cores: Sequence[str] = (),
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        room: Callable[[], AbstractContextManager[object]] = nullcontext,
        adapters: Mapping[str, Path] = MappingProxyType({}),
        fetch_adapter: Callable[[str, str], Path],
        before: Service | None = None,
        on_death: Callable[[ServingError], None] = lambda _error: None,
        progress: LoadProgress = SILENT,
    ) -> None:
        """Wait until the engines are ready. With `before`, no engine is started and that service's metrics are reused.

        `launches`, `cores`, `on_death`: see `Replicas`; `room`: see `LoopSettings`. `tokenizer` is called while the
        engines load. `functions`: of `model.py`. `adapters`, `fetch_adapter`: see `Adapters`.

        Raises:
            ServingError: an engine could not be loaded.
        """
        self.options = options
        self.metrics: Metrics = Metrics() if before is None else before.metrics
        self._tracing: Tracing | None = None
        if options.otlp_traces_endpoint is not None:
            name = options.model_names[0]
            self._tracing = Tracing(options.otlp_traces_endpoint, name, environment())
        self._recorder = Recorder(self.metrics, self._tracing)
        self.defaults: Mapping[str, Any] = {}
        """Parameters of OpenAI's requests that set none; set before requests come."""
        self.loop = Replicas(
            launches,
            tokenizer,
            observer=self._recorder,
            cores=cores,
            settings=LoopSettings.of(options, room, partial(once_free, wait_s=options.core_wait_s)),
            on_death=on_death,
            on_progress=progress.stage,
            adapters=[*adapters.values()],
        )
        with ExitStack() as made:
            made.callback(self.stop)
            # The tokenizer and the engines load side by side: each imports a large library.
            start = self.loop.start_all if before is None else lambda: None
            started = ThreadPoolExecutor(1).submit(start)
            self.tokenizer = tokenizer()
            made.callback(self.tokenizer.close)
            self.threads = Threads(
                TEXT_THREADS,
                "djl-neuronx-text",
                lambda: self.loop.most + TEXT_THREADS,
                self._recorder.rejected,
            )
            """The threads that parse requests, which wait for template and tokenizer."""
            self.custom = None
            """The formatters of `model.py`, if it has any."""
            if functions:
                # Other threads than those that parse: slow texts delay no stream.
                threads = Threads(TEXT_THREADS, "djl-neuronx-formatters")
                limit_s = options.text_timeout
                self.custom = custom.CustomFormatters(functions, self.tokenizer, limit_s, threads)
            started.result()
            self.adapters = Adapters(self.loop, options, adapters, fetch_adapter)
            made.pop_all()
        if before is None:
            self.show()
        self.loaded_s = int(time.time())
        """Time of the load, in seconds of the clock."""
        self.files: frozenset[tuple[Path, int, int]] = frozenset()
        """The files of the model and of its adapters, each with size and time: another service with the same ones has
        the same model."""

    @classmethod
    def load(
        cls,
        properties: Mapping[str, Any] | None,
        model_dir: Path | None,
        *,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, str] = MappingProxyType({}),
        file: str | None = None,
        content: bytes | None = None,
        prepared: Prepared | None = None,
        placed: Sequence[str] = (),
        before: Service | None = None,
        on_death: Callable[[ServingError], None] = lambda _error: None,
        progress: LoadProgress = SILENT,
    ) -> Service:
        """Fetch, compile and load the model that the settings name, and start serving it. Takes seconds to hours.

        `properties` come from DJL Serving (None outside it), `overrides` from the command line. `file` and `content`:
        see `read_settings`. `placed`: the cores of each copy, from `place`; by default this model has the machine to
        itself. `prepared`: the model, if it was prepared together with others. To replace a service `before`,
        everything is prepared and no engine started, which `Replicas.start` does.

        Raises:
            ServingError: the settings, the model's files or the machine do not allow it.
        """
        started_s = time.monotonic()
        progress.stage("reading the settings and fetching the model")
        prepared = prepared or prepare_or_raise(
            properties,
            model_dir,
            environ=environ,
            overrides=overrides,
            file=file,
            content=content,
            progress=progress,
        )
        options = prepared.options
        functions = _formatters(properties, model_dir, options)
        launch = make_launch(prepared, placed, progress)
        service = cls(
            options,
            launch.tokenizer,
            launch.starts,
            cores=launch.cores,
            functions=functions,
            room=launch.room,
            adapters=launch.adapters,
            fetch_adapter=partial(fetch_allowed, prepared),
            before=before,
            on_death=on_death,
            progress=progress,
        )
        service.defaults = launch.defaults
        folders = [prepared.artifact.path, *filter(Path.is_dir, launch.adapters.values())]
        service.files = frozenset[tuple[Path, int, int]]().union(*map(_files, folders))
        if before is None:
            service.metrics["load_seconds"].set(time.monotonic() - started_s)
            spec = service.loop.spec
            logger.info(
                "loaded backend=%s%s model_type=%s copies=%d slots=%d n_positions=%d prefill_buckets=%s seconds=%.2f",
                prepared.backend,
                " (no model runs, answers are made up)" if spec.simulated else "",
                prepared.artifact.model_type,
                len(launch.cores),
                spec.num_slots,
                spec.max_model_len,
                spec.prefill_buckets,
                time.monotonic() - started_s,
            )
        for compiled in launch.graphs:
            if compiled.cache_hit is not None:
                outcome = "hits" if compiled.cache_hit else "misses"
                service.metrics[f"compile_cache_{outcome}_total"].inc()
        return service

    @classmethod
    def load_target(cls, target: str, overrides: Mapping[str, str], **more: Any) -> Service:  # noqa: ANN401
        """Load the model that a command line names, see `find_target`; `more`: see `load`.

        Raises:
            ServingError: see `find_target` and `load`.
        """
        found = find_target(target, environment())
        overrides = {**found.overrides, **overrides}
        file, content = found.file, found.content
        return cls.load(None, found.folder, overrides=overrides, file=file, content=content, **more)

    def parse(
        self,
        body: bytes,
        *,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        path: str = "",
        payload: dict[str, Any] | None = None,
    ) -> ParsedRequest:
        """Parse and validate a request body. Any thread. `request_id` is the client's, for the response and for logs.

        `payload`: see `parse_body`.

        Raises:
            RequestError: the request is invalid.
        """
        context = ParseContext(
            tokenizer=self.tokenizer,
            client_id=client_label(request_id),
            headers=headers or {},
            path=path,
            options=self.options,
            max_model_len=self.loop.spec.max_model_len,
            vocab_size=self.loop.spec.vocab_size,
            longest_prompt=longest_prompt(self.loop.spec),
            max_prompt_chars=self._max_prompt_chars,
            with_defaults=partial(with_defaults, configured=self.defaults, spec=self.loop.spec),
            default_max_tokens=self.defaults.get("max_new_tokens"),
            adapters=self.loop.places.copy(),
            has_logprobs=self.loop.spec.has_logits,
        )
        try:
            return parse_body(body, context, payload, self.custom)
        except ServingError as error:
            self._recorder.rejected(error)
            raise

    def show(self) -> None:
        """Let the gauges show this service."""
        spec = self.loop.spec
        for i, copy in enumerate(self.loop.copies):
            for name, fact in (
                ("slots_in_use", "running"),
                ("waiting_requests", "waiting"),
                ("speculating", "speculates"),
            ):
                self.metrics[name].labels(i).set_function(
                    lambda copy=copy, fact=fact: getattr(copy.loop.state, fact)
                )
            self.metrics["kv_cache_tokens"].labels(i).set(spec.num_slots * spec.max_model_len)
            self.metrics["kv_cache_used_tokens"].labels(i).set_function(
                lambda copy=copy: copy.loop.streams.num_tokens(spec.cache_block)
            )

    @property
    def speculation(self) -> dict[str, object] | None:
        """The speculation in use, as plain values: number of drafts, their source, whether it is active. Or None."""
        facts = self.loop.speculation
        return None if facts is None else {**facts, "active": self.loop.state.speculates}

    @cached_property
    def _max_prompt_chars(self) -> int | None:
        return most_characters(self.tokenizer.pieces, longest_prompt(self.loop.spec))

    def stop(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> bool:
        """Close the copies, see `Replicas.close`, and export what is left of the traces."""
        closed = self.loop.close(drain_s, join_s)
        if self._tracing is not None:
            self._tracing.close()
        return closed

    def close(self, drain_s: float = 0.0) -> None:
        """Let running requests end for at most `drain_s`, then free the device. Idempotent."""
        closed = self.stop(drain_s)
        self.tokenizer.close()
        if not closed:
            logger.error(
                "device_left_open reason='a call has not returned; closing it now could crash the process'"
            )


def _files(folder: Path) -> frozenset[tuple[Path, int, int]]:
    """The files of a model, each with size and time.

    Raises:
        ArtifactError: one cannot be read.
    """
    with reading(folder):
        paths = [folder.resolve() / name for name in file_names(folder)]
        found = [(path, path.stat() if path.exists() else path.lstat()) for path in paths]
    return frozenset((path, stat.st_size, stat.st_mtime_ns) for path, stat in found)


def _formatters(
    properties: Mapping[str, Any] | None, model_dir: Path | None, options: ServingOptions
) -> dict[str, Callable[..., Any]]:
    """Return the functions of `model.py`, by kind: DJL Serving's properties have them, or the trusted folder does.

    Raises:
        ArtifactError: `model.py` cannot be read or imported.
    """
    functions = {name: one for name, one in (properties or {}).items() if callable(one)}
    if properties is None and options.trust_remote_code and model_dir is not None:
        functions = custom.load(model_dir)
    if options.output_formatter is not None:
        functions.pop("output_formatter", None)
    return functions
