"""The one composition root: settings → artifact → backend → engine → Service. Doors get a Service and nothing else."""

from __future__ import annotations

import itertools
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import formats
from djl_python_neuronx.artifacts.formats import Artifact
from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.backends.base import Backend, ModelSpec
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.config import device
from djl_python_neuronx.config.defaults import make_buckets
from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.loader import choose_loader, libraries
from djl_python_neuronx.config.model import ModelFacts
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.plan import make_plan
from djl_python_neuronx.config.resolve import Resolved, assess, examine
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.config.values import shown
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.loop import EngineLoop
from djl_python_neuronx.engine.warmup import warm_up as run_every_graph
from djl_python_neuronx.errors import (
    ArtifactNotFoundError,
    BackendError,
    ConfigError,
    ServingError,
    StepError,
)
from djl_python_neuronx.protocol import parse_body
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest
from djl_python_neuronx.recorder import Recorder
from djl_python_neuronx.telemetry import Metrics
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

_CLIENT_ID = re.compile(r"[!-~]{1,128}")
"""Ids that are taken over from clients: what can stand in a header and on a line of a log."""


class Service:
    """A loaded model that answers requests."""

    def __init__(
        self,
        options: ServingOptions,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        warm_up: bool = False,
        on_death: Callable[[ServingError], None] | None = None,
    ) -> None:
        """Start the engine, after a first run of every graph if asked. `on_death`: see `EngineLoop`."""
        self.options = options
        self.backend = backend
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        self._ids = itertools.count(1)
        self._max_prompt_chars = _max_prompt_chars(backend.spec, tokenizer)
        engine = Engine(backend, decode_interleave=options.decode_interleave)
        if warm_up:
            self._warm_up(engine)
        self.loop = EngineLoop(
            engine,
            tokenizer,
            max_waiting=options.max_waiting,
            step_timeout_s=options.predict_timeout,
            on_death=on_death,
            observer=Recorder(self.metrics),
        )
        self.metrics["slots_in_use"].set_function(lambda: engine.num_running)
        self.metrics["waiting_requests"].set_function(lambda: engine.num_waiting)
        self.loop.start()

    def _warm_up(self, engine: Engine) -> None:
        started_s = time.monotonic()
        try:
            cold = run_every_graph(engine)
        except StepError as error:
            self.backend.close()
            msg = f"the first run of every graph failed: {error}"
            raise BackendError(msg) from error
        except BaseException:
            self.backend.close()
            raise
        seconds = time.monotonic() - started_s
        logger.info("warmed_up seconds=%.2f cold_decode_buckets=%s", seconds, cold)

    @classmethod
    def load(
        cls,
        properties: Mapping[str, Any] | None,
        model_dir: Path | None,
        *,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, str] = MappingProxyType({}),
        on_death: Callable[[ServingError], None] | None = None,
    ) -> Service:
        """Resolve the settings, load the model and start to serve it; takes seconds to minutes.

        `properties` is what DJL Serving passes (None outside it), `overrides` the command line's.

        Raises:
            ServingError: what is wrong with the settings, the model's files or the machine.
        """
        started_s = time.monotonic()
        environ = environment() if environ is None else environ
        settings, problems = examine(properties, model_dir, environ, overrides)
        _log_settings(settings)
        machine = device.detect(environ=environ)
        if machine.assumed:
            logger.warning("device_assumed reason=%r", machine.assumed)
        try:
            artifact, name = _chosen(settings, machine)
        except ServingError as error:
            if not problems:
                raise
            raise ConfigError.collect([*problems, ConfigError(str(error))]) from error
        resolved, unsuitable = assess(settings, artifact.config, machine, name, artifact.dtype)
        _log_settings(resolved, told=settings)
        if problems or unsuitable:
            raise ConfigError.collect([*problems, *unsuitable])
        _log_plan(resolved, artifact, machine, name)
        options = resolved.options
        tokenizer = load_tokenizer(
            artifact.path, trust_remote_code=options.trust_remote_code, revision=options.revision
        )
        backend = backends.load(name, _plan(options, artifact, _eos_ids(artifact, tokenizer)))
        logger.info(
            "loaded backend=%s model_type=%s slots=%d n_positions=%d prefill_buckets=%s seconds=%.2f",
            name,
            artifact.model_type,
            backend.spec.num_slots,
            backend.spec.max_model_len,
            backend.spec.prefill_buckets,
            time.monotonic() - started_s,
        )
        service = cls(
            options, backend, tokenizer, warm_up=not options.skip_warmup, on_death=on_death
        )
        service.metrics["load_seconds"].set(time.monotonic() - started_s)
        return service

    def parse(
        self,
        body: bytes,
        *,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ParsedRequest:
        """Understand and check a request body; any thread. `request_id` is the client's, for the echo and for logs.

        Raises:
            RequestError: what is wrong with the request.
        """
        context = ParseContext(
            tokenizer=self.tokenizer,
            request_id=f"r{next(self._ids)}",
            client_id=request_id if request_id and _CLIENT_ID.fullmatch(request_id) else "",
            headers=headers or {},
            max_prompt_chars=self._max_prompt_chars,
            output_formatter=self.options.output_formatter,
        )
        try:
            parsed = parse_body(body, context)
            self.loop.engine.check(parsed.request)
        except ServingError as error:
            self.count_rejected(error)
            raise
        return parsed

    def count_rejected(self, error: ServingError) -> None:
        """Note a request that never got into the queue."""
        self.metrics["rejected_requests_total"].labels(error.code).inc()

    def close(self, drain_s: float = 0.0) -> None:
        """Let running requests end for at most `drain_s`, then free the device. Idempotent."""
        if self.loop.close(drain_s):
            self.backend.close()
        else:
            logger.error(
                "device_left_open reason='a call has not returned; closing it now could crash the process'"
            )


def _chosen(resolved: Resolved, machine: DeviceInfo) -> tuple[Artifact, str]:
    """The model's files and the name of the backend that is to load them."""
    origin = "the model_dir argument" if resolved.options.model_id is None else "option.model_id"
    artifact = formats.detect(_local_folder(resolved), origin=origin)
    name = choose_loader(
        resolved.options,
        machine,
        libraries(),
        backends.names(),
        artifact.backend,
        artifact.model_type,
    )
    obstacle = backends.supports(name, artifact)
    if obstacle is not None:
        msg = f"the {name} backend cannot serve the model in {artifact.path}: {obstacle}"
        raise BackendError(msg)
    return artifact, name


def _log_settings(resolved: Resolved, told: Resolved | None = None) -> None:
    """Options that are not at their default and what is to be said of them, without what was `told` before.

    In two steps, so that the log of a start that fails in between says where its settings came from.
    """
    before = set() if told is None else {(name, where) for name, _, where in told.explain()}
    for option, value, origin in resolved.explain():
        if (option, origin) not in before:
            level = logging.DEBUG if origin == "default" else logging.INFO
            logger.log(level, "option name=%s value=%s origin=%r", option, shown(value), origin)
    if told is None:
        for key, doubt in resolved.suspicious.items():
            logger.warning("option_suspicious name=%s reason=%r", key, doubt)
        for option, reason in resolved.ignored.items():
            logger.info("option_ignored name=%s reason=%r", option, reason)
    for finding in resolved.findings[len(told.findings) if told else 0 :]:
        level = logging.WARNING if finding.level == "warning" else logging.INFO
        logger.log(level, "option_finding level=%s %s", finding.level, resolved.describe(finding))


def _log_plan(resolved: Resolved, artifact: Artifact, machine: DeviceInfo, loader: str) -> None:
    """What is about to be compiled and loaded, so that the log of a start that was killed tells why."""
    facts = ModelFacts.from_config(artifact.config, artifact.dtype)
    planned = make_plan(resolved, facts, machine, loader, artifact_format=artifact.format)
    logger.info(
        "planned backend=%s format=%s parameters=%s graphs=%d estimated_compile_s=%.0f needed_gib_per_core=%s",
        loader,
        artifact.format,
        facts.num_parameters,
        len(planned.graphs),
        planned.estimated_compile_s,
        f"{planned.memory.needed / 2**30:.2f}" if planned.memory else "unknown",
    )


def _max_prompt_chars(spec: ModelSpec, tokenizer: Tokenizer) -> int | None:
    """Characters that no prompt which fits can have; None if the tokenizer does not say how long a token can be.

    Generous by a factor of four, for normalisers that make the text shorter.
    """
    if tokenizer.pieces is None:
        return None
    longest_piece = max(map(len, tokenizer.pieces), default=1)
    return 4 * longest_prompt(spec) * max(longest_piece, 16)


def _local_folder(resolved: Resolved) -> Path:
    """Where the model lies: `model_id` (relative to the model folder) or the model folder itself."""
    options = resolved.options
    if options.model_id is None:
        return options.model_dir or Path()
    model_id = Path(options.model_id).expanduser()
    folder = model_id if options.model_dir is None else options.model_dir / model_id
    if not folder.is_dir() and not model_id.is_dir():
        msg = (
            f"option.model_id is {options.model_id!r} (from {resolved.origins.get('model_id', 'default')}), which is "
            "no local folder. This version loads local folders only: download the model first and name its folder"
        )
        raise ArtifactNotFoundError(msg)
    return folder if folder.is_dir() else model_id


def _eos_ids(artifact: Artifact, tokenizer: Tokenizer) -> frozenset[int]:
    """The model's own, else the tokenizer's; without any, only lengths and stop strings end a text."""
    if artifact.eos_ids:
        return artifact.eos_ids
    vocab_size = artifact.config.get("vocab_size")
    beyond = tokenizer.eos_id is not None and tokenizer.eos_id >= (vocab_size or sys.maxsize)
    if tokenizer.eos_id is None or beyond:
        logger.warning(
            "no_eos path=%s reason='no id of the vocabulary in configuration or tokenizer'",
            artifact.path,
        )
        return frozenset()
    return frozenset({tokenizer.eos_id})


def _plan(options: ServingOptions, artifact: Artifact, eos_ids: frozenset[int]) -> LoadPlan:
    """The backend's orders: `complete` has filled in every value that they need."""
    max_model_len, num_slots = options.max_model_len, options.max_rolling_batch_size
    prefill_buckets = options.context_length_estimate
    if max_model_len is None or num_slots is None or prefill_buckets is None:
        msg = "n_positions, max_rolling_batch_size and context_length_estimate must be filled in first"
        raise ConfigError(msg)
    return LoadPlan(
        model_dir=artifact.path,
        kind=artifact.kind,
        num_slots=num_slots,
        max_model_len=max_model_len,
        prefill_buckets=prefill_buckets,
        token_buckets=options.token_buckets or make_buckets(max_model_len),
        dtype="bfloat16" if options.dtype == "bfloat16" else "float32",
        trust_remote_code=options.trust_remote_code,
        revision=options.revision,
        num_threads=options.cpu_threads,
        eos_ids=eos_ids,
    )
