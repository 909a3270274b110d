"""Options of the embedded server: limits of requests, connections, keys and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from djl_python_neuronx.config.values import (
    Address,
    Count,
    Endpoint,
    LocalPath,
    Lower,
    Namespace,
    Object,
    Option,
    OptionGroup,
    Origins,
    Port,
    Seconds,
)

_OPERATOR = Option(operator=True, output="local")


class LimitOptions(OptionGroup):
    """Limits and defaults of requests."""

    max_request_seconds: Annotated[Seconds | None, Option()] = None
    """Longest time from the arrival of a request to the end of its answer, which then ends with what there is (finish
    reason `time`); a request that never had a slot gets 408. A request can ask for less time (docs/protocols.md).
    Default: no limit."""
    max_body_bytes: Annotated[Count, Option()] = 6_291_456
    """Longest body of a request in bytes; a longer one gets 413. The default, 6 MiB, is SageMaker's own limit. DJL
    Serving also has its own limit (64 MiB). In the embedded server all bodies of more than 64 KiB that are being
    read or parsed take at most eight times as much; above that, they get 503."""
    chat_template_kwargs: Annotated[
        Object | None, Option(aliases=("default_chat_template_kwargs",), file=True)
    ] = None
    """Variables of the chat template, such as `{"enable_thinking": false}`; those of a request are added, and take
    precedence."""
    unknown_parameters: Annotated[Literal["error", "warn"], Lower, Option()] = "error"
    """Unknown fields of requests: `error` answers 400, `warn` ignores them, as vLLM and TGI do, and logs each name
    once. Fields inside `messages` are ignored in any case, known ones with an effect that this server lacks are refused
    (docs/protocols.md)."""
    text_timeout: Annotated[Seconds, Option()] = 10.0
    """Longest time of chat template and tokenizer for a request, which then gets 400, and of one call of a function of
    `model.py`. Longer work is ended (docs/security.md)."""


class ServerOptions(OptionGroup):
    """The embedded server."""

    api_key_file: Annotated[LocalPath | None, _OPERATOR] = None
    """File with API keys, one in each line; empty lines and lines that begin with `#` are skipped. Every request needs
    one of them as `Authorization: Bearer <key>` or `x-api-key: <key>`, except `/ping`, `/health` and the page; others
    get 401. The variable `DJL_NEURONX_API_KEY` has further keys, separated by commas. Both are read at the start, the
    file again at SIGHUP. A relative path begins at the working directory. An error under DJL Serving, which checks no
    keys."""
    cors_allow_origins: Annotated[Origins | None, _OPERATOR] = None
    """Web sites whose pages may use the server: CORS headers are sent to them. Default: none."""
    page: Annotated[bool, Option()] = True
    """A page at `/` for browsers, with a chat and live metrics (docs/server.md). Embedded server only."""
    access_log: Annotated[Literal["text", "json", "off"], Lower, Option()] = "text"
    """One line of the log for each request, when its answer ends (docs/server.md); `json`: as a JSON object.
    Successful requests of `/ping`, `/health` and `/metrics` are left out."""
    cloudwatch_namespace: Annotated[Namespace | None, _OPERATOR] = None
    """Log the metrics once a minute as a line from which CloudWatch Logs makes metrics below this namespace
    (docs/metrics.md)."""
    otlp_traces_endpoint: Annotated[Endpoint | None, _OPERATOR] = None
    """Export a trace of each request to this URL, such as `http://collector:4318/v1/traces`, by OpenTelemetry's
    protocol (docs/observability.md). Needs the extra `otel`. Variables of OpenTelemetry set the rest, such as
    OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER. Also under DJL Serving."""
    ping: Annotated[Literal["any", "all"], Lower, Option()] = "any"
    """Condition for 200 of `/ping` and `/health` with several models, once none is loading: `any` of them takes
    requests, or `all` do."""
    admin_port: Annotated[Port | None, _OPERATOR] = None
    """Second port, for the operator: `/metrics`, `/info`, `/ping`, `/health` and the routes that change adapters
    (docs/lora.md), without API keys. The first port has neither these routes nor, then, `/metrics` and `/info`."""
    admin_host: Annotated[Address | None, _OPERATOR] = None
    """Address to listen on for `admin_port`. Default: that of the first port."""
    request_head_timeout: Annotated[Seconds, Option()] = 10.0
    """Longest time from a new connection, or from the first byte of a further request, to the end of the headers; then
    408. A new connection without a byte is closed without an answer. Embedded server only: under DJL Serving clients
    talk to Java."""
    request_body_timeout: Annotated[Seconds, Option()] = 30.0
    """Longest time from the headers to the end of the body; then 408. Embedded server only."""
    write_timeout: Annotated[Seconds, Option()] = 30.0
    """Longest time that a client may read nothing of an answer that waits for it; then its connection is closed. One
    that reads little by little keeps its connection, but not its slot: its request ends when 8192 parts of its answer
    are unread. Embedded server only."""
    keep_alive_timeout: Annotated[Seconds, Option()] = 75.0
    """Longest pause between two requests of a connection; then it is closed. Embedded server only."""
    max_connections: Annotated[Count, Option()] = 4096
    """Connections at once; on the next 64 only `/ping` and `/health` are served and others get 503, and for each one
    more the oldest that has sent no request is closed. It is lower if the hard limit of open files (`ulimit -Hn`) does
    not allow as many. Embedded server only."""
