"""Promises about the code itself: import directions, import cost, generated pages, the error tree."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from asyncio.sslproto import SSLProtocol
from pathlib import Path

import pytest

from djl_python_neuronx import backends, errors
from djl_python_neuronx.config.options import ServingOptions, allowed_values
from tests.planning.settings import resolve
from tools import document, recipes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "djl_python_neuronx"


def test_import_contracts():
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    ran = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", ran.stdout)
    assert kept, ran.stdout
    assert int(kept[1]) >= 3


def test_importing_the_handler_is_cheap():
    check = "import sys, djl_python_neuronx.handler; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    assert "djl_python_neuronx.handler" in loaded
    assert not loaded & {"torch", "transformers", "openai", "boto3", "starlette", "uvicorn"}


def test_a_start_imports_nothing_that_only_a_compile_needs():
    check = "import sys, djl_python_neuronx.cli, djl_python_neuronx.service; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    assert "djl_python_neuronx.loading.prepare" in loaded
    unwanted = {"packaging", "tomllib", "tomli", "djl_python_neuronx.backends.nxdi"}
    unwanted |= {"djl_python_neuronx.planning.defects", "djl_python_neuronx.planning.sdks"}
    assert not loaded & unwanted


def test_the_environment_is_read_in_two_places_only():
    allowed = {PACKAGE / "config/sources.py", PACKAGE / "backends/env.py"}
    readers = {
        path
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    }
    assert readers <= allowed


@pytest.mark.parametrize(
    ("package", "place", "names", "use"),
    [
        (
            "h11",
            "h11:Connection",
            {"_receive_buffer"},
            "empty lines before a request are skipped in it",
        ),
        ("h11", "h11._receivebuffer:ReceiveBuffer", {"maybe_extract_at_most"}, "it skips them"),
        (
            "uvicorn",
            "uvicorn.protocols.http.h11_impl:H11Protocol",
            {
                "_get_upgrade",
                "_unset_keepalive_if_required",
                "timeout_keep_alive_task",
                "timeout_keep_alive",
            },
            "upgrades are ignored, and limits of time replace its own",
        ),
        (
            "uvicorn",
            "uvicorn.protocols.http.h11_impl:H11Protocol",
            {"app", "client", "conn", "connections", "cycle", "on_response_complete", "scheme"},
            "its parser and its app are replaced, and its connections are counted",
        ),
        (
            "uvicorn",
            "uvicorn.protocols.http.h11_impl:H11Protocol",
            {"app_state", "flow"},
            "streams are written past it, unless their client must read first",
        ),
        (
            "uvicorn",
            "uvicorn.protocols.http.flow_control:FlowControl",
            {"write_paused"},
            "streams are written past it, unless their client must read first",
        ),
        (
            "uvicorn",
            "uvicorn.protocols.http.h11_impl:RequestResponseCycle",
            {"disconnected", "message_event"},
            "a refused request ends as if its client had left",
        ),
        ("uvicorn", "uvicorn:Config", {"loaded_app"}, "the second port has its own app"),
        (
            "uvicorn",
            "uvicorn:Server",
            {"servers", "server_state"},
            "the second port ends with the first",
        ),
        ("boto3", "botocore.httpchecksum:", {"_CHECKSUM_CLS"}, "downloads are verified with these"),
    ],
)
def test_private_names_of_libraries_are_there_and_bounded(package, place, names, use):
    module, _, name = place.partition(":")
    pytest.importorskip(module.partition(".")[0])
    owner = importlib.import_module(module)
    owner = getattr(owner, name) if name else owner
    codes = [one.__code__ for one in vars(owner).values() if inspect.isfunction(one)]
    gone = names - set(dir(owner)) - {word for code in codes for word in code.co_names}
    assert not gone, f"{package} has changed: {place} has no {gone} ({use}); do this in another way"
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'"{package}>=[\d.]+,<[\d.]+"', pyproject)
    assert not re.search(rf'"{package}>=[\d.]+"', pyproject)


def test_private_arguments_of_asyncios_tls_are_there():
    """server/http.py makes this object itself: `start_tls` loses what comes behind the keys."""
    expected = ["loop", "app_protocol", "sslcontext", "waiter", "server_side", "server_hostname"]
    expected += ["call_connection_made", "ssl_handshake_timeout"]
    if sys.version_info >= (3, 11):
        expected.append("ssl_shutdown_timeout")
    given = list(inspect.signature(SSLProtocol).parameters)
    changed = set(given) ^ set(expected) or given[:4] != expected[:4]
    assert not changed, f"this Python's asyncio.sslproto.SSLProtocol takes other arguments: {given}"


def error_tree(parent, depth=1):
    """(depth, class, other bases, status or None where it is the parent's), in the order of definition."""
    for child in parent.__subclasses__():
        if child.__module__ == errors.__name__:
            bases = {base.__name__ for base in child.__bases__ if base is not parent}
            yield depth, child, bases, None if child.status == parent.status else child.status
            yield from error_tree(child, depth + 1)


def test_the_error_tree_is_its_docstring():
    line = re.compile(r"^( *)[*+-] (\w+)(?:\((\w+)\))?(?: +(\d+))?", re.MULTILINE)
    (_, root, _, status), *rows = line.findall(errors.__doc__)
    assert (root, int(status)) == ("ServingError", errors.ServingError.status)
    real = list(error_tree(errors.ServingError))
    assert [(len(indent) // 2, name) for indent, name, _, _ in rows] == [
        (depth, child.__name__) for depth, child, _, _ in real
    ]
    for (_, name, base, documented), (_, child, bases, own_status) in zip(rows, real, strict=True):
        assert not base or base in bases, name
        assert int(documented) == child.status if documented else own_status is None, name


def test_every_error_has_a_code_of_its_own():
    codes = [child.code for _, child, _, _ in error_tree(errors.ServingError)]
    assert len(set(codes)) == len(codes)


MADE = {
    errors.UnknownOptionError: ("n_position", "line 3"),
    errors.InvalidOptionError: ("dtype", "f99", "line 3", "f32 or bf16"),
    errors.ArtifactMismatchError: ({"n_positions": (512, [1024])}, "/model", {}),
    errors.HttpError: ("what and why", 405),
    errors.RequestError: ("what and why", "top_p"),
    errors.ServingError: ("what and why",),
}
"""Arguments of each error, and of those of its kind that have none here."""


def test_every_error_comes_back_from_another_process_with_its_attributes():
    for _, kind, _, _ in [(0, errors.ServingError, (), 500), *error_tree(errors.ServingError)]:
        error = kind(*next(MADE[one] for one in kind.mro() if one in MADE))
        if isinstance(error, errors.BackendError):
            error.fatal = True
        sent = json.dumps(errors.to_json(error))
        back = errors.revive(**json.loads(sent))
        assert (type(back), str(back), back.args) == (kind, str(error), error.args)
        assert json.dumps(errors.to_json(back)) == sent
        lost = [name for name in vars(error) if not hasattr(back, name)]
        assert not lost, kind


def test_every_error_comes_back_from_another_process():
    for _, kind, _, _ in [(0, errors.ServingError, (), 500), *error_tree(errors.ServingError)]:
        error = errors.revive(kind.code, "what and why")
        assert (type(error), str(error), error.args) == (kind, "what and why", ("what and why",))
        assert errors.ConfigError not in kind.mro() or error.problems == (error,)
    assert type(errors.revive("of_another_version", "what")) is errors.ServingError


def texts_of(path):
    """The docstrings of a file, those of fields too, by line."""
    bodies = [vars(node).get("body", []) for node in ast.walk(ast.parse(path.read_text()))]
    statements = [one for body in bodies if isinstance(body, list) for one in body]
    for one in statements:
        match one:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield one.lineno, text


def test_no_docstring_opens_like_a_question():
    folders = ("djl_python_neuronx", "tools", "deploy", "docker", "benchmarks", "examples", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = [(path, *text) for path in paths for text in texts_of(path)]
    assert len(texts) > 2000
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path, line, text in texts
        if re.match(r"\s*(what|whether|why)\b", text, re.IGNORECASE)
    ]
    assert not found, "begin with a noun phrase or an imperative (CONTRIBUTING.md):\n" + "\n".join(
        found
    )


def test_generated_pages_are_current():
    pages = {
        "docs/options.md": document.options_page(),
        "docs/architectures.md": document.architectures_page(),
        "docs/support.md": document.support_page(),
        "docs/metrics.md": document.metrics_page(),
        "docs/defaults.md": document.defaults_page(),
        "docs/recipes.md": recipes.page(),
        "serving.properties.example": document.example_file(),
    }
    for name, text in pages.items():
        assert (ROOT / name).read_text() == text, f"{name} is out of date; run `make docs`"


def test_every_option_is_described():
    texts = document.descriptions()
    assert list(texts) == list(ServingOptions.model_fields)
    for name, text in texts.items():
        assert len(text) > 20, name
        assert text.endswith("."), name


def test_the_example_file_is_all_defaults(tmp_path):
    lines = (ROOT / "serving.properties.example").read_text()
    uncommented = re.sub(r"^#option\.", "option.", lines, flags=re.MULTILINE)
    (tmp_path / "serving.properties").write_text(uncommented)
    # DJL Serving takes no empty degree.
    defaults = ServingOptions(model_dir=tmp_path, async_mode=True, tensor_parallel_degree="max")
    assert resolve(None, tmp_path, {}).options == defaults


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.properties")), ids=lambda path: path.name
)
def test_every_recipe_resolves(tmp_path, path):
    (tmp_path / "serving.properties").write_bytes(path.read_bytes())
    assert resolve(None, tmp_path, {}).options.async_mode


def test_every_backend_can_be_asked_for():
    for name in backends.names():
        assert name in allowed_values("model_loader")
