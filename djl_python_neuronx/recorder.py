"""What the engine loop does, as metrics and log lines."""

from __future__ import annotations

import logging

from djl_python_neuronx.engine.runner import StepInfo
from djl_python_neuronx.engine.streams import Stream
from djl_python_neuronx.engine.text import Delta
from djl_python_neuronx.telemetry import Metrics

logger = logging.getLogger(__name__)


class Recorder:
    """The engine loop's observer: metrics, and a log line per request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._generated = metrics["generated_tokens_total"]
        self._reencoded = metrics["reencoded_tokens_total"]
        self._decode_seconds = metrics["decode_seconds"]

    def stepped(self, info: StepInfo | None, num_tokens: int) -> None:
        """See `Observer`."""
        self._generated.inc(num_tokens)
        if info is None:
            return
        self._reencoded.inc(info.num_reencoded)
        if info.drafts_s:
            self._metrics["draft_seconds"].observe(info.drafts_s)
        if info.draft_failed:
            self._metrics["draft_failures_total"].inc()
        if info.kind in {"prefill", "mixed"}:
            self._metrics[f"{info.kind}_seconds"].labels(info.bucket).observe(info.device_s)
            columns = info.bucket * (info.rows if info.kind == "prefill" else 1)
            self._metrics["padding_tokens_total"].inc(max(0, columns - info.tokens))
        else:
            self._decode_seconds.observe(info.device_s)
        if info.drafted:
            self._metrics["draft_tokens_total"].inc(info.drafted)
            self._metrics["accepted_draft_tokens_total"].inc(info.accepted)

    def given_up(self, stream: Stream) -> None:
        """See `Observer`."""
        self._metrics["requests_total"].labels(stream.request.protocol, "aborted").inc()
        logger.info("request_aborted request_id=%s", stream.request.label)

    def ended(self, stream: Stream, delta: Delta) -> None:
        """See `Observer`."""
        metrics, request = self._metrics, stream.request
        total_s = stream.last_token_s - stream.submitted_s
        reason = delta.finish_reason.value if delta.finish_reason else ""
        metrics["requests_total"].labels(request.protocol, reason).inc()
        metrics["prompt_tokens_total"].inc(len(request.prompt_ids))
        metrics["request_seconds"].observe(total_s)
        first_s = 0.0
        if stream.first_token_s is not None:
            first_s = stream.first_token_s - stream.submitted_s
            metrics["time_to_first_token_seconds"].observe(first_s)
            if delta.num_generated_tokens > 1:
                metrics["inter_token_seconds"].observe(
                    (total_s - first_s) / (delta.num_generated_tokens - 1)
                )
        logger.info(
            "request_finished request_id=%s protocol=%s reason=%s prompt_tokens=%d generated_tokens=%d "
            "first_token_s=%.4f total_s=%.4f%s",
            request.label,
            request.protocol,
            reason,
            len(request.prompt_ids),
            delta.num_generated_tokens,
            first_s,
            total_s,
            f" error={delta.error.code}" if delta.error is not None else "",
        )
