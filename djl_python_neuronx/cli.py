"""The command line ``djl-neuronx`` and its commands, from ``serve`` to ``completion``."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from djl_python_neuronx import bench, capacity, documentation, verify
from djl_python_neuronx.artifacts.manifest import package_version
from djl_python_neuronx.config import flags
from djl_python_neuronx.config.sources import API_KEYS, LOG_FORMAT, MODEL_DIR, environment, taken
from djl_python_neuronx.errors import ConfigError, ServingError, redacted
from djl_python_neuronx.progress import progress_bars
from djl_python_neuronx.telemetry import setup_logging

if TYPE_CHECKING:
    from djl_python_neuronx.loading.prepared import Prepared
    from djl_python_neuronx.planning.machines import DeviceInfo
    from djl_python_neuronx.service import Service

    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8080

Run: TypeAlias = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status of the process."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown and arguments.command == "options":
        arguments.names += unknown  # a flag of serve is a name of an option
    elif unknown:
        arguments.refuse(f"unrecognized arguments: {flags.unknown(unknown, arguments.own)}")
    for target in _targets(arguments):
        if target in {"true", "false"}:
            arguments.refuse(
                f"{target!r} stands where a model is expected: flags such as --trust-remote-code take no value; write "
                f"--no-trust-remote-code, or -o trust_remote_code={target}"
            )
    setup_logging(arguments.log_level.upper(), arguments.log_format)
    try:
        run: Run = arguments.run
        return run(arguments)
    except ServingError as error:
        if arguments.log_format == "json":
            logger.error("command_failed command=%s\n%s", arguments.command, error)  # noqa: TRY400
        else:
            sys.stderr.write(f"djl-neuronx: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT


def _targets(arguments: argparse.Namespace) -> Sequence[str]:
    """The models that a command line names."""
    given = vars(arguments)
    return [*given.get("models", ()), *given.get("target", ()), given.get("model", "")]


class _Parser(argparse.ArgumentParser):
    def __init__(self, **how: Any) -> None:  # noqa: ANN401  (argparse's)
        # An unknown flag must not be taken for the beginning of another.
        super().__init__(allow_abbrev=False, **how)

    def error(self, message: str) -> NoReturn:
        super().error(redacted(message))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="djl-neuronx",
        description="Serve large language models on AWS Inferentia2 and Trainium, or on a CPU.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands)
    _add_check(commands)
    _add_plan(commands)
    _add_compile(commands)
    _add_convert(commands)
    _add_options_command(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_verify(commands)
    _add_completion(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    command = commands.add_parser(
        "serve",
        help="load models and serve them over HTTP",
        description="Load models and serve SageMaker's /invocations and /ping, OpenAI's /v1/chat/completions, and the "
        "routes of docs/server.md. Options are read from -o, then from serving.properties in the folder, then "
        "from OPTION_* environment variables; the first source that sets an option wins.",
    )
    command.add_argument(
        "models",
        nargs="*",
        default=[str(MODEL_DIR)],
        metavar="model",
        help="folder with the model or with a serving.properties that names one, .properties file, Hugging Face id or "
        "s3:// URI "
        f"(default {MODEL_DIR}); several are served side by side, requests name theirs",
    )
    _add_server(command)
    _add_options(command)
    _complete(command, _serve, log_level="info")


def _add_server(command: argparse.ArgumentParser, *, unused: bool = False) -> None:
    """Add the flags of the server itself. `unused`: they have no effect, and the help does not list them."""

    def shown(text: str) -> str:
        return argparse.SUPPRESS if unused else text

    everywhere = "0.0.0.0"  # noqa: S104  (SageMaker's container contract requires it)
    command.add_argument(
        "--host",
        "--hostname",
        default=everywhere,
        help=shown("address to listen on (default %(default)s)"),
    )
    command.add_argument(
        "--port",
        "-p",
        type=_port,
        help=shown(f"port to listen on (default SAGEMAKER_BIND_TO_PORT, or else {DEFAULT_PORT})"),
    )
    command.add_argument(
        "--drain",
        "--graceful-termination-timeout",
        type=_seconds,
        default=25.0,
        metavar="S",
        help=shown(
            "seconds that running requests have to end at shutdown (default %(default)g); the process ends at most 2 "
            "seconds later, within the 30 of SageMaker and Kubernetes"
        ),
    )
    command.add_argument(
        "--exit-on-error",
        type=_flag,
        default=True,
        metavar="{true,false}",
        help=shown(
            "false: of several models one that cannot be loaded answers 503 with the reason, and the others are "
            "served (default true: the process ends)"
        ),
    )
    about = None if unused else "Flags of uvicorn; files in PEM format."  # else an empty section
    tls = command.add_argument_group("TLS", about)
    for flag, metavar, text in (
        ("certfile", "FILE", "certificate; with it the server speaks TLS"),
        ("keyfile", "FILE", "key of the certificate, if in a separate file"),
        ("keyfile-password", "TEXT", "password of the key"),
        (
            "ca-certs",
            "FILE",
            "authorities; a client must present a certificate that one of them has signed",
        ),
    ):
        tls.add_argument(f"--ssl-{flag}", metavar=metavar, help=shown(text))


def _add_check(commands: Commands) -> None:
    command = commands.add_parser(
        "check",
        help="dry run of a start: print options, plan and problems; needs no weights, device or compiler",
        description="Print every option with its value and source, the plan (backend, graphs to compile, memory per "
        "core) and every problem with its fix, and of several models or copies the cores of each. Reads config.json, "
        "no weights. Flags of serve, such as --port, are accepted. "
        "Exit status: 0 if the plan is possible, 1 if it is not, 2 for a wrong command line.",
    )
    command.add_argument(
        "target",
        nargs="*",
        help="model folder, .properties file, Hugging Face id or s3:// URI; several: models of one server "
        f"(default {MODEL_DIR} if it exists, or else the model in HF_MODEL_ID or OPTION_MODEL_ID)",
    )
    _add_instance(command)
    command.add_argument("--all", action="store_true", help="also list options at their default")
    command.add_argument("--json", action="store_true", help="print JSON (keys: docs/check.md)")
    _add_server(command, unused=True)
    _add_options(command)
    _complete(command, _check, log_level="warning")


def _add_plan(commands: Commands) -> None:
    command = commands.add_parser(
        "plan",
        help="find the instances that a load needs, by simulation; needs no device",
        description="Try instance types, degrees and slots in a simulator of the engine, and print the cheapest that "
        "serves a load within limits of time, its options, and why not the others. docs/plan.md explains all.",
    )
    capacity.add_arguments(command, _instance)
    _add_options(command)
    _complete(command, capacity.run, log_level="warning")


def _add_compile(commands: Commands) -> None:
    command = commands.add_parser(
        "compile",
        help="compile a model ahead of time into a folder that is served as it is",
        description="Compile the graphs of a model and write them with its configuration, tokenizer and options to a "
        "folder or to S3. The result is served without compiling. If compile is killed and started again, it continues "
        "with the next graph. The cpu backend has no graphs: only the options are fixed.",
    )
    command.add_argument(
        "model", help="model folder, .properties file, Hugging Face id or s3:// URI"
    )
    command.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder or s3://bucket/folder; it must be new or empty, or an unchanged output of this command, which is "
        "replaced",
    )
    command.add_argument(
        "--weights",
        choices=["none", "link", "copy", "presharded"],
        help="how the weights get into the output: as hard links if on the same disk (default with tnx and cpu), as "
        "copies, not at all, or cut for each core (default with nxdi; with tnx it needs the machine's cores and turns "
        "on_device_embedding on)",
    )
    command.add_argument(
        "--overwrite", action="store_true", help="replace the output folder, whatever it contains"
    )
    _add_server(command, unused=True)
    _add_instance(command)
    _add_options(command)
    _complete(command, _compile, log_level="info")


def _add_convert(commands: Commands) -> None:
    command = commands.add_parser(
        "convert",
        help="write a checkpoint in another layout",
        description="Write a whole checkpoint as safetensors, or split as in transformers-neuronx (one file for each "
        "tensor). One tensor is in memory at a time, and each is compared with its original.",
    )
    command.add_argument("source", type=Path, help="model folder")
    command.add_argument("destination", type=Path, help="new folder")
    command.add_argument("--to", choices=["safetensors", "split"], default="safetensors")
    command.add_argument(
        "--dequantize",
        action="store_true",
        help="write a quantised checkpoint (AWQ, GPTQ, FP8) in bfloat16",
    )
    _complete(command, _convert, log_level="info")


def _add_options_command(commands: Commands) -> None:
    command = commands.add_parser(
        "options",
        help="print the documentation of options",
        description="Print what docs/options.md has of options: meaning, values, default, other names.",
    )
    command.add_argument(
        "names", nargs="*", metavar="name", help="or a flag or variable; default: list all names"
    )
    _complete(command, documentation.run, log_level="info")


def _add_bench(commands: Commands) -> None:
    command = commands.add_parser(
        "bench",
        help="measure a running server under load",
        description="Send requests to a running server, and print times to first token, between tokens and end to end, "
        "throughput and goodput. Needs the extra `bench`: guidellm sends and measures. docs/bench.md explains all.",
    )
    bench.add_arguments(command)
    _complete(command, bench.run, log_level="info")


def _add_doctor(commands: Commands) -> None:
    command = commands.add_parser(
        "doctor",
        help="examine this machine: versions, devices, memory, disk, network, clock",
        description="Print versions beside those of one Neuron SDK, devices and who holds them, memory, disk, network, "
        "clock, and every problem with its fix. Exit status: 0 without errors, 1 with one, 2 for a wrong command line.",
    )
    command.add_argument("model", nargs="?", help="model to be served here, which is checked too")
    command.add_argument("--json", action="store_true", help="print JSON (keys: docs/doctor.md)")
    _complete(command, _doctor, log_level="warning")


def _add_verify(commands: Commands) -> None:
    command = commands.add_parser(
        "verify",
        help="compare a model on this machine's device with transformers on the CPU",
        description="Load a model as serve does, run every graph, slot and number of rows with known token ids, and "
        "compare logits, tokens and distributions with transformers on the CPU. Flags of serve, such as --port, are "
        "accepted. Exit status: 0 if all is right, 1 if something is wrong, 2 for a wrong command line.",
    )
    verify.add_arguments(command)
    _add_server(command, unused=True)
    _add_options(command)
    _complete(command, verify.run, log_level="warning")


def _add_completion(commands: Commands) -> None:
    command = commands.add_parser(
        "completion",
        help="print the completion script of a shell",
        description="Print the completion script of a shell; for example `djl-neuronx completion bash > "
        "/etc/bash_completion.d/djl-neuronx`.",
    )
    command.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    _complete(command, _completion, log_level="info")


def _add_instance(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--instance",
        type=_instance,
        metavar="TYPE",
        help="plan for this instance type instead of this machine, for example inf2.48xlarge",
    )


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-o",
        "--option",
        action="append",
        type=flags.pair,
        default=[],
        metavar="NAME=VALUE",
        help="set option.NAME; may be repeated. An option is a flag too: --tensor-parallel-degree 8, and by the names "
        "of vLLM and TGI: --tensor-parallel-size 8, --num-shard 8",
    )
    flags.add_flags(command)


def _complete(command: argparse.ArgumentParser, run: Run, *, log_level: str) -> None:
    """Set what every command has: the function that runs it, and its log's level and format."""
    levels = ["debug", "info", "warning", "error"]
    command.add_argument("--log-level", choices=levels, default=log_level)
    command.add_argument(
        "--log-format",
        type=_log_format,
        metavar="{text,json}",
        default=environment().get(LOG_FORMAT, "text"),
        help=f"json: an object in each line, its time in UTC (default: variable {LOG_FORMAT}, or else text)",
    )
    every = command._option_string_actions  # argparse has no public list
    own = tuple(flag for flag, action in every.items() if action.dest != "option")
    command.set_defaults(run=run, refuse=command.error, own=own)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from djl_python_neuronx.config.findings import Problems
        from djl_python_neuronx.config.resolve import read_settings
        from djl_python_neuronx.loading.check import check_all
        from djl_python_neuronx.loading.situation import Purpose
        from djl_python_neuronx.loading.targets import Target, find_target
        from djl_python_neuronx.server.http import tls_context
        from djl_python_neuronx.server.keys import read_keys
        from djl_python_neuronx.server.models import Load, Model
        from djl_python_neuronx.server.process import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] == __package__:
            raise  # a bug of this package: no installation helps
        msg = f"the embedded server needs {error.name}; install it: pip install 'djl-python-neuronx[server]'"
        raise ConfigError(msg) from error

    tls = tls_context(**{n: value for n, value in vars(arguments).items() if n.startswith("ssl_")})
    variable = taken(API_KEYS)
    given, several = dict(arguments.option), len(arguments.models) > 1
    loads: dict[Model, Load] = {}
    prepared: dict[str, Prepared | None] = {}
    for target in arguments.models:
        # The port is opened with these options. Their problems are reported by the load, all of them at once.
        found = Target(None, {"model_id": target})
        with suppress(ServingError):
            found = find_target(target, environment())
        settings = read_settings(
            None,
            found.folder,
            environment(),
            Problems(),
            {**found.overrides, **given},
            file=found.file,
            content=found.content,
        )
        options = settings.options
        loads[Model(redacted(target), options)] = partial(_load, target, given, prepared)
    api_keys = read_keys(options.api_key_file, variable)

    def prepare() -> Sequence[Sequence[str] | ServingError]:
        keys = read_keys(options.api_key_file, variable)
        placed: Sequence[Sequence[str] | ServingError] = [()]
        if several:
            placement = check_all(
                arguments.models, environ=environment(), overrides=given, purpose=Purpose.SERVE
            )
            if arguments.exit_on_error:
                placement.raise_errors()
            placed = placement.without_broken()
            for target, report in zip(arguments.models, placement.reports, strict=True):
                prepared[target] = report.prepared
        api_keys[:] = keys
        return placed

    return serve(
        loads,
        host=arguments.host,
        port=arguments.port or _port_from_environment(),
        drain_s=arguments.drain,
        prepare=prepare,
        exit_on_error=arguments.exit_on_error,
        tls=tls,
        api_keys=api_keys,
    )


def _load(
    target: str,
    overrides: Mapping[str, str],
    several: Mapping[str, Prepared | None],
    stage: Callable[[str], None],
    **more: Any,  # noqa: ANN401  (for `Service.load`)
) -> Service:
    """Load a model; see `server.models.Load`. `several`: all models, prepared together; empty for a single one.

    Only a single one shows its progress as bars.
    """
    from djl_python_neuronx.loading.situation import SILENT
    from djl_python_neuronx.service import Service

    with nullcontext(SILENT) if several else progress_bars(sys.stderr) as progress:
        more |= {"prepared": several.get(target), "progress": progress.in_words(stage)}
        return Service.load_target(target, overrides, **more)


def _check(arguments: argparse.Namespace) -> int:
    from djl_python_neuronx.loading.check import check_all
    from djl_python_neuronx.loading.report import all_as_json, render
    from djl_python_neuronx.loading.text_trial import try_texts

    placement = check_all(
        arguments.target or [None],
        environ=environment(),
        overrides=dict(arguments.option),
        machine=arguments.instance,
    )
    try_texts(placement)
    if arguments.json:
        sys.stdout.write(json.dumps(all_as_json(placement), indent=2) + "\n")
    else:
        render(placement, sys.stdout, everything=arguments.all)
    return 0 if placement.ok else 1


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


def _doctor(arguments: argparse.Namespace) -> int:
    from djl_python_neuronx.doctor import run  # which imports half of the package

    return run(arguments)


def _convert(arguments: argparse.Namespace) -> int:
    try:
        from djl_python_neuronx.artifacts.convert import convert
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        msg = "converting a checkpoint needs torch, which is not installed. Run: pip install 'djl-python-neuronx[cpu]'"
        raise ConfigError(msg) from error

    convert(
        arguments.source,
        arguments.destination,
        arguments.to,
        dequantize=arguments.dequantize,
    )
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    sys.stdout.write(shtab.complete(_parser(), arguments.shell) + "\n")
    return 0


def _instance(name: str) -> DeviceInfo:
    from djl_python_neuronx.planning.machines import named

    try:
        return named(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _flag(text: str) -> bool:
    if text not in {"true", "false"}:
        msg = f"{text!r} is not true or false"
        raise argparse.ArgumentTypeError(msg)
    return text == "true"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        msg = f"{text!r} is not a number of seconds; expected 0 or more"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def _log_format(text: str) -> str:
    if text not in {"text", "json"}:
        msg = f"{text!r} is not a format of the log (--log-format or variable {LOG_FORMAT}); expected text or json"
        raise argparse.ArgumentTypeError(msg)
    return text


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
