"""The composition root: settings → artifact → backend → engine → `Service`, which every request handler is given."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.backends.base import Backend, ModelSpec, Want
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.loop import EngineLoop
from djl_python_neuronx.engine.speculation import DraftModel, NgramProposer, Proposer
from djl_python_neuronx.engine.warmup import warm_up as run_every_graph
from djl_python_neuronx.errors import (
    BackendError,
    IncompatibleOptionsError,
    ServingError,
    StepError,
)
from djl_python_neuronx.loading.compiled import Compiled, obtain
from djl_python_neuronx.loading.prepare import SILENT, LoadProgress, Prepared, prepare_or_raise
from djl_python_neuronx.protocol import parse_body
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest
from djl_python_neuronx.telemetry import Metrics, Recorder
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

_CLIENT_ID = re.compile(r"[!-~]{1,128}")
"""Client ids that are used as they are: those that fit into a header and a log line."""


class Service:
    """A loaded model that answers requests."""

    def __init__(
        self,
        options: ServingOptions,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        proposer: Proposer | None = None,
        warm_up: bool = False,
        on_death: Callable[[ServingError], None] | None = None,
    ) -> None:
        """Start the engine; with `warm_up`, run every graph once before. `on_death`: see `EngineLoop`.

        `proposer` proposes tokens for a backend that verifies them. Both are closed with the service, and also if the
        warm-up fails.
        """
        self.options = options
        self.backend = backend
        self._proposer = proposer
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        self._recorder = Recorder(self.metrics)
        self._ids = itertools.count(1)
        self._max_prompt_chars = _max_prompt_chars(backend.spec, tokenizer)
        engine = Engine(
            backend,
            decode_interleave=options.decode_interleave,
            max_join_wait_s=options.max_join_wait_ms / 1000,
            proposer=proposer,
        )
        if warm_up:
            try:
                _warm_up(engine)
            except BaseException:
                self._close_models()
                raise
        self.loop = EngineLoop(
            engine,
            tokenizer,
            max_waiting=options.max_waiting,
            step_timeout_s=options.predict_timeout,
            on_death=on_death,
            observer=self._recorder,
        )
        self.metrics["slots_in_use"].set_function(lambda: engine.num_running)
        self.metrics["waiting_requests"].set_function(lambda: engine.num_waiting)
        self.loop.start()

    @classmethod
    def load(
        cls,
        properties: Mapping[str, Any] | None,
        model_dir: Path | None,
        *,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, str] = MappingProxyType({}),
        on_death: Callable[[ServingError], None] | None = None,
        progress: LoadProgress = SILENT,
    ) -> Service:
        """Fetch, compile and load the model that the settings name, and start serving it. Takes seconds to hours.

        `properties` come from DJL Serving (None outside it), `overrides` from the command line.

        Raises:
            ServingError: the settings, the model's files or the machine do not allow it.
        """
        started_s = time.monotonic()
        environ = environment() if environ is None else environ
        prepared = prepare_or_raise(
            properties, model_dir, environ=environ, overrides=overrides, progress=progress
        )
        tokenizer, draft = prepared.load_tokenizer(), prepared.draft
        # Both before either is loaded: a compilation needs the cores that a loaded model holds.
        compiled = obtain(prepared, tokenizer)
        compiled_draft = None if draft is None else obtain(draft, tokenizer)
        backend = backends.get(prepared.backend).load(compiled.plan, compiled.folder)
        try:
            proposer = _load_proposer(prepared, backend.spec, compiled_draft)
        except BaseException:
            backend.close()
            raise
        logger.info(
            "loaded backend=%s model_type=%s slots=%d n_positions=%d prefill_buckets=%s seconds=%.2f",
            prepared.backend,
            prepared.artifact.model_type,
            backend.spec.num_slots,
            backend.spec.max_model_len,
            backend.spec.prefill_buckets,
            time.monotonic() - started_s,
        )
        options = prepared.options
        service = cls(
            options,
            backend,
            tokenizer,
            proposer=proposer,
            warm_up=not options.skip_warmup,
            on_death=on_death,
        )
        for graphs in (compiled, compiled_draft):
            if graphs is not None and graphs.cache_hit is not None:
                outcome = "hits" if graphs.cache_hit else "misses"
                service.metrics[f"compile_cache_{outcome}_total"].inc()
        service.metrics["load_seconds"].set(time.monotonic() - started_s)
        return service

    def parse(
        self,
        body: bytes,
        *,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ParsedRequest:
        """Parse and validate a request body. Any thread. `request_id` is the client's, for the response and for logs.

        Raises:
            RequestError: the request is invalid.
        """
        context = ParseContext(
            tokenizer=self.tokenizer,
            request_id=f"r{next(self._ids)}",
            client_id=request_id if request_id and _CLIENT_ID.fullmatch(request_id) else "",
            headers=headers or {},
            max_prompt_chars=self._max_prompt_chars,
            output_formatter=self.options.output_formatter,
            has_logprobs=Want.LOGITS in self.backend.spec.outputs,
        )
        try:
            return parse_body(body, context)
        except ServingError as error:
            self._recorder.rejected(error)
            raise

    @property
    def speculation(self) -> dict[str, object] | None:
        """The speculation in use, as plain values: number of drafts, their source, whether it is active. Or None."""
        if self._proposer is None:
            return None
        from_model = isinstance(self._proposer, DraftModel)
        return {
            "drafts": self.backend.spec.num_speculative_tokens,
            "from": "draft model" if from_model else "prompt lookup",
            "active": self.loop.engine.speculates,
        }

    def close(self, drain_s: float = 0.0) -> None:
        """Let running requests end for at most `drain_s`, then free the device. Idempotent."""
        if not self.loop.close(drain_s):
            logger.error(
                "device_left_open reason='a call has not returned; closing it now could crash the process'"
            )
            return
        self._close_models()

    def _close_models(self) -> None:
        self.backend.close()
        if self._proposer is not None:
            self._proposer.close()


def _warm_up(engine: Engine) -> None:
    started_s = time.monotonic()
    try:
        cold = run_every_graph(engine)
    except StepError as error:
        msg = f"the first run of every graph failed: {error}"
        raise BackendError(msg) from error
    seconds = time.monotonic() - started_s
    logger.info("warmed_up seconds=%.2f cold_graphs=%s", seconds, [*map(tuple, cold)])


def _load_proposer(
    prepared: Prepared, spec: ModelSpec, compiled: Compiled | None
) -> Proposer | None:
    """The source of proposed tokens for a model that verifies them, or None.

    A draft model, whose graphs are `compiled`, is loaded here.
    """
    draft = prepared.draft
    if not spec.num_speculative_tokens:
        return None
    if draft is None or compiled is None:
        return NgramProposer(spec, prepared.options.ngram_prompt_lookup_max or 1)
    backend = backends.get(draft.backend).load(compiled.plan, compiled.folder)
    problem = None
    if backend.spec.vocab_size != spec.vocab_size:
        problem = (
            f"has a vocabulary of {backend.spec.vocab_size} tokens, the model of {spec.vocab_size}"
        )
    elif Want.LOGITS not in backend.spec.outputs:
        problem = "samples on the device and returns no logits"
    if problem is not None:
        backend.close()
        msg = f"the draft model {problem}; set another speculative_draft_model"
        raise IncompatibleOptionsError(msg)
    return DraftModel(backend)


def _max_prompt_chars(spec: ModelSpec, tokenizer: Tokenizer) -> int | None:
    """A number of characters above that of any prompt that fits. None if the length of tokens is unknown.

    It leaves a factor of four for normalisers that shorten the text.
    """
    if tokenizer.pieces is None:
        return None
    longest_piece = max(map(len, tokenizer.pieces), default=1)
    return 4 * longest_prompt(spec) * max(longest_piece, 16)
