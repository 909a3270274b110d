"""The command line: ``djl-neuronx serve [model_dir]``."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.errors import ConfigError, ServingError
from djl_python_neuronx.telemetry import setup_logging

logger = logging.getLogger(__name__)

PACKAGE = "djl-python-neuronx"
DEFAULT_MODEL_DIR = Path("/opt/ml/model")
DEFAULT_PORT = 8080


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    arguments = _parser().parse_args(argv)
    setup_logging(arguments.log_level.upper())
    try:
        return _serve(arguments)
    except ServingError as error:
        print(f"djl-neuronx: {error}", file=sys.stderr)  # noqa: T201  (this is the program's own voice)
        return 1


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="djl-neuronx",
        description="Serve large language models on AWS Inferentia2 and Trainium, or on a CPU.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="load a model and answer over HTTP",
        description="Load a model folder and answer on /invocations, /predictions/{model}, /ping and /metrics "
        "(SageMaker's container contract). Options come from -o, serving.properties in the folder and OPTION_* "
        "environment variables, in that order.",
    )
    serve.add_argument(
        "model_dir",
        nargs="?",
        type=Path,
        default=DEFAULT_MODEL_DIR,
        help=f"folder with the model or with a serving.properties that names one (default {DEFAULT_MODEL_DIR})",
    )
    everywhere = "0.0.0.0"  # noqa: S104  (what SageMaker's container contract asks for)
    serve.add_argument(
        "--host", default=everywhere, help="address to listen on (default %(default)s)"
    )
    serve.add_argument(
        "--port", type=_port, help=f"default {DEFAULT_PORT}, or SAGEMAKER_BIND_TO_PORT"
    )
    serve.add_argument(
        "--drain",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds for running requests to end",
    )
    serve.add_argument(
        "-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="set option.NAME"
    )
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from djl_python_neuronx.server import serve
    except ImportError as error:
        msg = f"the embedded server needs {error.name}; install it: pip install 'djl-python-neuronx[server]'"
        raise ConfigError(msg) from error
    from djl_python_neuronx.service import Service

    model_dir: Path = arguments.model_dir
    overrides = _overrides(arguments.option)

    def load() -> Service:
        return Service.load(None, model_dir, overrides=overrides)

    port = arguments.port or _port_from_environment()
    name = model_dir.resolve().name
    return serve(load, folder_name=name, host=arguments.host, port=port, drain_s=arguments.drain)


def _overrides(pairs: Sequence[str]) -> dict[str, str]:
    overrides: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            msg = f"-o {pair!r} is not NAME=VALUE; for example -o max_rolling_batch_size=8"
            raise ConfigError(msg)
        overrides[name.strip().removeprefix("option.")] = value
    return overrides


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        msg = f"{text!r} is not a number of seconds; expected 0 or more"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 65536:
        msg = f"{text!r} is not a port; expected 1 to 65535"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _port_from_environment() -> int:
    bound = environment().get("SAGEMAKER_BIND_TO_PORT", "")
    try:
        return _port(bound) if bound else DEFAULT_PORT
    except argparse.ArgumentTypeError as error:
        msg = f"environment variable SAGEMAKER_BIND_TO_PORT: {error}"
        raise ConfigError(msg) from error


if __name__ == "__main__":
    sys.exit(main())
