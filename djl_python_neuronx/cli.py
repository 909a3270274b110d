"""The command line: ``djl-neuronx serve``, ``check``, ``compile`` and ``convert``."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from djl_python_neuronx.config.sources import MODEL_DIR, environment
from djl_python_neuronx.errors import ConfigError, ServingError
from djl_python_neuronx.telemetry import setup_logging

if TYPE_CHECKING:
    from rich.console import Console

    from djl_python_neuronx.loading.compile_process import CompileProgress
    from djl_python_neuronx.loading.prepare import LoadProgress
    from djl_python_neuronx.planning.machines import DeviceInfo

    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

logger = logging.getLogger(__name__)

PACKAGE = "djl-python-neuronx"
DEFAULT_PORT = 8080


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    arguments = _parser().parse_args(argv)
    setup_logging(arguments.log_level.upper())
    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
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
    _add_serve(commands)
    _add_check(commands)
    _add_compile(commands)
    _add_convert(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="load a model and answer over HTTP",
        description="Load a model and answer on /invocations, /predictions/{model}, /ping and /metrics "
        "(SageMaker's container contract). Options come from -o, serving.properties in the folder and OPTION_* "
        "environment variables, in that order.",
    )
    serve.add_argument(
        "model",
        nargs="?",
        default=str(MODEL_DIR),
        help="folder with the model or with a serving.properties that names one, Hugging Face id or s3:// URI "
        f"(default {MODEL_DIR})",
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
    _add_common(serve, log_level="info")
    serve.set_defaults(run=_serve)


def _add_check(commands: Commands) -> None:
    check = commands.add_parser(
        "check",
        help="tell what serving a model would do, in a second, without weights, device or compiler",
        description="Print every option with its value and where it comes from, the plan (backend, graphs to compile, "
        "memory per core), and all that is wrong, each with what to do. Reads config.json only. Exit status: 0 if "
        "nothing stands in the way of the plan, 1 if something does, 2 for a wrong command line.",
    )
    check.add_argument(
        "target",
        nargs="?",
        help="model folder, .properties file, Hugging Face id or s3:// URI "
        f"(default {MODEL_DIR}, or, without it, the model that HF_MODEL_ID or OPTION_MODEL_ID names)",
    )
    _add_instance(check)
    check.add_argument("--all", action="store_true", help="list options at their default too")
    check.add_argument("--json", action="store_true", help="print JSON (keys: docs/check.md)")
    _add_common(check, log_level="warning")
    check.set_defaults(run=_check)


def _add_compile(commands: Commands) -> None:
    compile = commands.add_parser(
        "compile",
        help="compile a model ahead of time into a folder that is served as it is",
        description="Compile the graphs of a model and write them with its configuration, tokenizer and options to a "
        "folder or to S3, from which it is served without compiling. Started again after it was killed, it goes on at "
        "the next graph. For the cpu backend there is nothing to compile: the options are pinned.",
    )
    compile.add_argument("model", help="model folder, Hugging Face id or s3:// URI")
    compile.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder or s3://bucket/folder: new, empty, or an unchanged output of this package, which is replaced",
    )
    compile.add_argument(
        "--weights",
        choices=["none", "link", "copy"],
        default="link",
        help="the model's weights in the output: hard links where the disk has them (default), copies, or left out",
    )
    compile.add_argument(
        "--overwrite", action="store_true", help="replace an output folder whatever it holds"
    )
    _add_instance(compile)
    _add_common(compile, log_level="info")
    compile.set_defaults(run=_compile)


def _add_convert(commands: Commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint in another layout",
        description="Write a whole checkpoint as safetensors, or split as transformers-neuronx has it (one file for "
        "each tensor). One tensor is in memory at a time, and each is compared with its original.",
    )
    convert.add_argument("source", type=Path, help="model folder")
    convert.add_argument("destination", type=Path, help="new folder")
    convert.add_argument("--to", required=True, choices=["safetensors", "split"])
    _add_log_level(convert, "info")
    convert.set_defaults(run=_convert)


def _add_instance(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--instance",
        type=_instance,
        metavar="TYPE",
        help="plan for this machine instead of the one at hand; for example inf2.48xlarge",
    )


def _add_common(command: argparse.ArgumentParser, *, log_level: str) -> None:
    command.add_argument(
        "-o",
        "--option",
        action="append",
        type=_pair,
        default=[],
        metavar="NAME=VALUE",
        help="set option.NAME",
    )
    _add_log_level(command, log_level)


def _add_log_level(command: argparse.ArgumentParser, log_level: str) -> None:
    levels = ["debug", "info", "warning", "error"]
    command.add_argument("--log-level", choices=levels, default=log_level)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from djl_python_neuronx.server.app import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] == __package__:
            raise  # a fault of this package, which no installation mends
        msg = f"the embedded server needs {error.name}; install it: pip install 'djl-python-neuronx[server]'"
        raise ConfigError(msg) from error
    from djl_python_neuronx.service import Service

    model_dir, named = _model(arguments.model)
    overrides = {**named, **dict(arguments.option)}

    def load() -> Service:
        with progress_bars(sys.stderr) as progress:
            return Service.load(None, model_dir, overrides=overrides, progress=progress)

    port = arguments.port or _port_from_environment()
    where = arguments.model if model_dir is None else str(model_dir.resolve())
    name = where.rstrip("/").rpartition("/")[2]
    return serve(load, folder_name=name, host=arguments.host, port=port, drain_s=arguments.drain)


def _model(target: str) -> tuple[Path | None, dict[str, str]]:
    """The model folder, or the option that names a model which lies elsewhere: a path would eat a URI's slash."""
    from djl_python_neuronx.artifacts import fetch

    folder = fetch.local_folder(target, None)
    if folder is None and (fetch.uri_scheme(target) or fetch.is_hub_id(target)):
        return None, {"model_id": target}
    return folder or Path(target), {}


def _check(arguments: argparse.Namespace) -> int:
    from djl_python_neuronx.loading.check import check
    from djl_python_neuronx.loading.report import as_json
    from djl_python_neuronx.loading.terminal import render

    report = check(
        arguments.target,
        environ=environment(),
        overrides=dict(arguments.option),
        machine=arguments.instance,
    )
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(report), indent=2) + "\n")
    else:
        render(report, sys.stdout, everything=arguments.all)
    return 0 if report.ok else 1


def _compile(arguments: argparse.Namespace) -> int:
    from djl_python_neuronx.loading.partition import compile_model

    with progress_bars(sys.stderr) as progress:
        made = compile_model(
            arguments.model,
            arguments.output,
            environ=environment(),
            overrides=dict(arguments.option),
            machine=arguments.instance,
            weights=arguments.weights,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    sys.stdout.write(f"{arguments.output}: {len(made.files)} files\n")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from djl_python_neuronx.artifacts.convert import convert

    convert(arguments.source, arguments.destination, arguments.to)
    return 0


def _instance(name: str) -> DeviceInfo:
    from djl_python_neuronx.planning.machines import named

    try:
        return named(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        msg = f"{text!r} is not NAME=VALUE; for example -o max_rolling_batch_size=8"
        raise argparse.ArgumentTypeError(msg)
    return name.strip().removeprefix("option."), value


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


@contextmanager
def progress_bars(stream: TextIO) -> Iterator[LoadProgress]:
    """Bars below the log for as long as something is transferred or compiled."""
    from djl_python_neuronx.loading.prepare import SILENT, LoadProgress

    try:
        from rich.console import Console
    except ImportError:
        yield SILENT
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield SILENT
        return
    with _log_above(console), _Bars(console) as shown:
        yield LoadProgress(shown.transfer, shown.compile)


class _Bars:
    """Two bars that come with their first number."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._rich = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._transfer = self._rich.add_task("transfer", total=None, visible=False, told="")
        self._compile = self._rich.add_task("compile", total=None, visible=False, told="")

    def __enter__(self) -> _Bars:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def transfer(self, done: int, total: int) -> None:
        """See `Progress`."""
        told = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
        self._rich.update(
            self._transfer, completed=done, total=total, visible=done < total, told=told
        )

    def compile(self, progress: CompileProgress) -> None:
        """See `LoadProgress`."""
        told = (
            f"graph {progress.num_done}/{progress.num_graphs}, {progress.elapsed_s / 60:.0f} min, "
            f"some {progress.remaining_s / 60:.0f} min left"
        )
        self._rich.update(
            self._compile,
            completed=progress.num_done,
            total=progress.num_graphs,
            visible=progress.num_done < progress.num_graphs,
            told=told,
        )


@contextmanager
def _log_above(console: Console) -> Iterator[None]:
    """The log's lines go through the console, which keeps them above the bars."""
    handlers = [
        handler
        for handler in logging.getLogger("djl_python_neuronx").handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is console.file
    ]
    lines = _Lines(console)
    for handler in handlers:
        handler.setStream(lines)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(console.file)


class _Lines:
    """The part of a stream that a log handler needs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Every write is one already."""


if __name__ == "__main__":
    sys.exit(main())
