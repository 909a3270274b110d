"""The images: what every Dockerfile has to say, the scripts that they run, and the replay that stands in for Docker."""

import faulthandler
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from djl_python_neuronx.cli import _parser
from djl_python_neuronx.planning.sdks import table
from tests import known_answers
from tests.doubles.s3_rig import KEYS
from tests.processes import wait_until

pytest_plugins = ["tests.doubles.s3_fixtures"]
ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
sys.path.append(str(DOCKER))
import replay  # noqa: E402

IMAGES = sorted(path.suffix[1:] for path in DOCKER.glob("Dockerfile.*"))
CLIENTS = {"cpu", "djl", "nxdi", "tnx"}


def steps(name):
    """The instructions of an image, after those of the image of ours that it starts from."""
    found = replay.instructions((DOCKER / f"Dockerfile.{name}").read_text())
    bases = [text for kind, text in found if kind == "FROM"]
    assert len(bases) == 1
    if bases[0].startswith(replay.OWN_IMAGE):
        return [*steps("cpu"), *found]
    return found


def last(name, kind):
    texts = [text for instruction, text in steps(name) if instruction == kind]
    assert texts, f"Dockerfile.{name} has no {kind}"
    return texts[-1]


def test_there_is_an_image_for_each_backend_and_one_with_djl_serving():
    assert set(IMAGES) == CLIENTS


@pytest.mark.parametrize("name", IMAGES)
class TestImage:
    def test_the_user_has_no_rights(self, name):
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(name, "USER"))

    def test_signals_reach_the_server(self, name):
        assert last(name, "STOPSIGNAL") == "SIGTERM"
        assert json.loads(last(name, "ENTRYPOINT"))[0] in {path.name for path in DOCKER.iterdir()}

    def test_it_serves_without_arguments_as_sagemaker_asks(self, name):
        assert json.loads(last(name, "CMD")) == ["serve"]
        assert last(name, "EXPOSE") == "8080"
        assert "healthcheck.py" in last(name, "HEALTHCHECK")
        labels = " ".join(text for kind, text in steps(name) if kind == "LABEL")
        assert 'com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true"' in labels
        # Only DJL Serving loads and unloads models by requests.
        multi_model = 'com.amazonaws.sagemaker.capabilities.multi-models="true"' in labels
        assert multi_model == (name == "djl")
        for label in ("title", "description", "licenses", "revision", "version"):
            assert f"org.opencontainers.image.{label}=" in labels

    def test_the_environment_has_a_list_of_what_is_in_it(self, name):
        made = next(text for _, text in steps(name) if "--output-file /sbom.json" in text)
        python = "cpu" if name == "djl" else name  # the image below DJL Serving's
        assert f'name = "djl-python-neuronx-{python}"' in made

    def test_versions_are_in_one_place(self, name):
        """A base, package or download has its version from a build argument; versions.env or an SDK has its value."""
        for kind, text in steps(name):
            if kind == "FROM":
                assert re.fullmatch(r"\$\{\w+_BASE\}|djl-python-neuronx:\$\{BACKEND\}", text)
            if kind == "ARG" and "=" not in text:
                assert text in replay.pins(name)
            if kind in ("ADD", "RUN"):
                done = re.sub(r"--mount=\S+", "", text)
                assert not re.search(r"\d\.\d|==(?!\$\{)|\blatest\b", done)
                for package in re.findall(r"(?:aws-neuronx|openjdk)-\S+", done):
                    assert re.search(r"[=-]\$\{\w+\}", package), package


def test_every_version_is_used_and_has_a_source():
    used = {text for name in IMAGES for kind, text in steps(name) if kind == "ARG"}
    common, sdks = replay.read_pins("versions.env"), {*DOCKER.glob("sdk-*.env")}
    pinned = {**common, **{pin: "" for path in sdks for pin in replay.read_pins(path.name)}}
    defaults = {pin for pin in common if pin.endswith("_SDK")}
    assert {*pinned} - defaults == {name for name in used if "=" not in name}
    first, *groups = (DOCKER / "versions.env").read_text().split("\n\n")
    assert "NOT VERIFIED BY A BUILD" in first
    for group in [*groups, *(path.read_text() for path in sdks)]:
        assert re.search(r"^# .*Source", group, re.MULTILINE), group
        assert re.search(r"20\d\d-\d\d-\d\d", group), group
        assert "latest" not in group


PACKAGES = {
    "RUNTIME_LIB": "aws-neuronx-runtime-lib",
    "COLLECTIVES": "aws-neuronx-collectives",
    "TOOLS": "aws-neuronx-tools",
}
PYTHON_OF_BASE = {"ubuntu:22.04": "3.10", "ubuntu:24.04": "3.12"}


@pytest.mark.parametrize("path", sorted(DOCKER.glob("sdk-*.env")), ids=lambda path: path.stem)
def test_an_image_has_one_sdk(path):
    """Base, packages and constraints of an image are of one SDK, as the table of SDKs has it."""
    pins = replay.read_pins(path.name)
    (sdk,) = [one for one in table().sdk if one.version == pins["NEURON_SDK"]]
    assert sdk.version.startswith(f"{path.stem.removeprefix('sdk-')}.")
    assert PYTHON_OF_BASE[pins["NEURON_BASE"].rpartition("/")[2]] in sdk.python
    packages = {PACKAGES.get(pin, pin.lower().replace("_", "-")): pin for pin in pins}
    found = {name: pins[pin] for name, pin in packages.items() if name in sdk.packages}
    assert len(found) >= 7
    assert {name: version for name, version in found.items() if not sdk.has(name, version)} == {}
    assert bool(pins.get("NKI")) == ("nki" in sdk.packages and "TRANSFORMERS_NEURONX" not in pins)
    lines = (ROOT / "constraints" / pins["CONSTRAINTS"]).read_text().splitlines()
    transformers = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")[
        "transformers"
    ]
    if "NEURONX_DISTRIBUTED_INFERENCE" in pins and "transformers" in sdk.packages:
        assert sdk.has("transformers", transformers)


def test_what_is_skipped():
    """The steps that need one of the places in the list, and no other."""
    found = [
        (name, kind, part)
        for name in IMAGES
        for kind, text in replay.instructions((DOCKER / f"Dockerfile.{name}").read_text())
        for part, reason in replay.SKIPPED.items()
        if replay.skips(kind, text) == reason
    ]
    aws = "repos.neuron.amazonaws.com"
    assert found == [
        ("djl", "RUN", "publish.djl.ai"),
        *((name, kind, aws) for name in ("nxdi", "tnx") for kind in ("ADD", "RUN", "RUN")),
    ]


@pytest.mark.parametrize(("name", "sdk"), [("tnx", "2.25"), ("nxdi", "2.24"), ("nxdi", "2.31")])
def test_the_compiler_of_an_old_sdk_takes_its_own_numpy(monkeypatch, name, sdk):
    """AWS's notes of SDK 2.25 name numpy up to 1.22: with the pin of `constraints/` pip would refuse the compiler."""
    monkeypatch.setenv("SDK", sdk)
    (step,) = [
        text
        for kind, text in replay.instructions((DOCKER / f"Dockerfile.{name}").read_text())
        if kind == "RUN" and "pip.repos.neuron" in text
    ]
    (used,) = re.findall(r"--constraint (\S+)", step)
    (making,) = re.findall(rf"(grep .*?) > {used}", step)
    environ = {**os.environ, "CONSTRAINTS": replay.pins(name)["CONSTRAINTS"]}
    command = ["sh", "-c", making.replace("/constraints/", f"{ROOT}/constraints/")]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    made = ran.stdout
    assert "\ntransformers==" in made
    assert "numpy" not in made


class TestReplay:
    """The replay refuses what it would do otherwise than Docker."""

    def test_lines_are_joined_and_comments_left_out(self):
        text = "# c\nRUN a \\\n    # in between\n    && b\n\nUSER 1:1\n"
        assert replay.instructions(text) == [("RUN", "a     && b"), ("USER", "1:1")]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("RUN cat <<E", "here-documents"),
            ("RUN a \\", "continues"),
        ],
    )
    def test_text(self, text, message):
        with pytest.raises(replay.ReplayError, match=message):
            replay.instructions(text)

    @pytest.mark.parametrize(
        ("kind", "text", "message"),
        [
            ("ARG", "NOWHERE", "NOWHERE has no value"),
            ("ENV", "A=${NOWHERE}", "NOWHERE has no value"),
            ("ENV", "A b", "expected NAME=value"),
            ("USER", "somebody", "expected numbers"),
            ("CMD", "serve", "not a JSON list"),
            ("ENTRYPOINT", "serve", "not a JSON list"),
            ("COPY", "--from=a b c", "only --chmod"),
            ("COPY", "README.md /", "not in the build context"),
            ("COPY", "docker/no-such.py /", "not in the build context"),
            ("COPY", "docker/replay.py docker/replay.sh /a", "several files need a folder"),
            ("RUN", "--mount=type=secret,id=a true", "not known here"),
            ("RUN", "--network=none true", "not known here"),
            ("RUN", "--mount=type=cache,target=/var/cache true", "no folder of this machine"),
        ],
    )
    def test_instruction(self, tmp_path, kind, text, message):
        with pytest.raises(replay.ReplayError, match=message):
            replay.STEPS[kind](replay.Image(), tmp_path, text)
        assert not list(tmp_path.iterdir())

    def test_variables_and_files(self, tmp_path):
        image = replay.Image()
        for kind, text in (
            ("ARG", 'A="x y"'),
            ("ENV", 'B="$A/z" PATH=/b:$PATH'),
            ("WORKDIR", "/w/${A}"),
            ("COPY", "--chmod=750 docker/*.py here/"),
        ):
            replay.STEPS[kind](image, tmp_path, text)
        assert image.env["B"] == "x y/z"
        assert image.env["PATH"].startswith("/b:/")
        copied = tmp_path / "w/x y/here/replay.py"
        assert copied.read_bytes() == (DOCKER / "replay.py").read_bytes()
        assert copied.stat().st_mode & 0o777 == 0o750

    def test_what_docker_would_get_for_a_build_is_little(self):
        """The context has no environment and no .git: only what Dockerfiles read."""
        assert [path.name for path in replay.in_context("docker/entrypoint.sh")] == [
            "entrypoint.sh"
        ]
        for left_out in (".git", "djl_python_neuronx", "tests"):
            with pytest.raises(replay.ReplayError, match="not in the build context"):
                replay.in_context(left_out)


GIT = """case $1 in
rev-parse) echo 0ec5 ;;
config) echo https://user:password@host/a ;;
tag) echo "$TAG" ;;
esac"""


@pytest.mark.parametrize(
    ("name", "backend", "sdk"),
    [
        ("cpu", "", ""),
        ("djl", "cpu", ""),
        ("djl", "nxdi", "2.28"),
        ("nxdi", "", ""),
        ("nxdi", "", "2.24"),
        ("tnx", "", ""),
    ],
)
def test_build_gives_every_version(tmp_path, monkeypatch, name, backend, sdk):
    """The command lines of `docker build`; djl's image is built after the one that it starts from."""
    shutil.copytree(DOCKER, tmp_path / "docker")
    for program, line in (("docker", 'echo "$*" >> "$LOG"'), ("git", GIT)):
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    log = tmp_path / "log"
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LOG": str(log)}
    environ |= {"BACKEND": backend, "SDK": sdk}
    monkeypatch.setenv("SDK", sdk)
    command = [tmp_path / "docker/build.sh", name, "--pull"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (ran.returncode, log.exists()) == (1, False)
    assert "run make dist" in ran.stderr

    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/djl_python_neuronx-1.2.dev3+g0ec5-py3-none-any.whl").touch()
    subprocess.run(command, env=environ, check=True)
    *before, line = log.read_text().splitlines()
    assert [one.split()[2] for one in before] == [f"docker/Dockerfile.{backend}"] * bool(backend)
    suffix = f"-sdk{sdk}" if sdk else ""
    tag = f"{name}-{backend}{suffix}" if backend else f"{name}{suffix}"
    words = line.split()
    assert words[:3] == ["build", "--file", f"docker/Dockerfile.{name}"]
    assert words[3:5] == ["--tag", f"djl-python-neuronx:{tag}"]
    assert words[-2:] == ["--pull", "."]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert given.get("NEURON_SDK", sdk).startswith(sdk)
    found = replay.instructions((DOCKER / f"Dockerfile.{name}").read_text())
    pinned = {text for kind, text in found if kind == "ARG" and "=" not in text}
    expected = {pin: value for pin, value in replay.pins(name).items() if pin in pinned}
    assert given == {
        **expected,
        "PACKAGE_VERSION": "1.2.dev3+g0ec5",
        "REVISION": "0ec5",
        "SOURCE": "https://host/a",
        **({"BACKEND": f"{backend}{suffix}"} if backend else {}),
    }


def test_a_release_has_all_images(tmp_path):
    """Printed and run: one for each SDK's file and the CPU, with and without DJL Serving; only at the wheel's tag."""
    shutil.copytree(DOCKER, tmp_path / "docker")
    (tmp_path / "bin").mkdir()
    for program, text in (("docker", 'echo "$*" >> "$LOG"'), ("git", GIT)):
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    log = tmp_path / "log"
    log.touch()

    def release(*words, tag="v1.2"):
        environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LOG": str(log), "TAG": tag}
        command = [tmp_path / "docker/release.sh", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert "run make release" in release().stderr
    (tmp_path / "dist").mkdir()
    for platform in ("any", "manylinux_2_17_x86_64"):
        (tmp_path / f"dist/djl_python_neuronx-1.2-py3-none-{platform}.whl").touch()
    refused = release(tag="v1.1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "has no tag v1.2" in refused.stderr

    printed = release("--dry-run", "registry/x")
    assert printed.returncode == 0, printed.stderr
    assert not log.read_text()
    images = ["cpu", "nxdi-sdk2.24", "tnx-sdk2.25", "nxdi-sdk2.28", "nxdi-sdk2.31"]
    assert {path.name for path in DOCKER.glob("sdk-*")} == {
        f"sdk-{image.rpartition('sdk')[2]}.env" for image in images[1:]
    }
    images = [f"{prefix}{image}" for image in images for prefix in ("", "djl-")]
    tags = [f"tag djl-python-neuronx:{image} registry/x:1.2-{image}" for image in images]
    lines = printed.stdout.splitlines()
    assert [line.removeprefix("docker ") for line in lines if "docker tag" in line] == tags

    ran = release("registry/x")
    assert (ran.returncode, ran.stdout.splitlines()) == (0, lines), ran.stderr
    done = log.read_text().splitlines()
    assert [line for line in done if line.startswith("tag ")] == tags
    built = [line.split()[4] for line in done if line.startswith("build ")]
    assert built == [f"djl-python-neuronx:{image}" for image in images]


@pytest.mark.parametrize(
    ("name", "sdk", "message"),
    [
        ("nxdi", "2.27", "SDK=2.27: expected one of docker/sdk-2.24.env"),
        ("nxdi", "2.25", "it is for the image tnx"),
        (
            "tnx",
            "2.31",
            "has no TRANSFORMERS_NEURONX, which the image tnx needs; it is for the image nxdi",
        ),
        ("cpu", "2.31", "the image cpu has none"),
        ("foo", "", "foo is no image: expected cpu, tnx, nxdi or djl"),
        ("djl foo", "", "BACKEND=foo: expected cpu, tnx or nxdi"),
        ("djl djl", "", "BACKEND=djl: expected cpu, tnx or nxdi"),
    ],
)
def test_build_refuses_an_sdk_that_an_image_cannot_have(tmp_path, name, sdk, message):
    for folder in ("docker", "dist"):
        (tmp_path / folder).mkdir()
    shutil.copytree(DOCKER, tmp_path / "docker", dirs_exist_ok=True)
    (tmp_path / "dist/djl_python_neuronx-1.2-py3-none-any.whl").touch()
    (tmp_path / "bin").mkdir()
    for program in ("docker", "git"):
        (tmp_path / "bin" / program).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / program).chmod(0o755)
    image, _, backend = name.partition(" ")
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SDK": sdk, "BACKEND": backend}
    command = [tmp_path / "docker/build.sh", image]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


RECORD = """#!/bin/sh
IFS='\t'
echo "$$ $(basename "$0")\t$*" >> "$LOG"
case "$*" in
check*) [ -z "${SLOW:-}" ] || sleep "$SLOW"; exit "${CHECKED:-0}" ;;
esac
env > "$LOG.env"
"""


@pytest.fixture
def start(tmp_path):
    """Run an entrypoint whose programs are recorders; its process id, status, the lines and the server's variables."""
    for name in ("djl-neuronx", "serving", "other"):
        (tmp_path / name).write_text(RECORD)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"

    def call(script, *words, environ=(), after=None):
        log.write_text("")
        own = {
            "PATH": f"{tmp_path}:{DOCKER}:{os.environ['PATH']}",
            "LOG": str(log),
            "SERVING_MODEL_STORE": str(tmp_path / "a store"),
            **dict(environ),
        }
        process = subprocess.Popen([DOCKER / script, *words], env=own, stderr=subprocess.PIPE)
        if after:
            after(process, log)
        _, errors = process.communicate(timeout=60)
        assert b"not found" not in errors
        lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
        seen = {}
        if (written := Path(f"{log}.env")).exists():
            seen = dict(
                line.split("=", 1) for line in written.read_text().splitlines() if "=" in line
            )
        ran = [shlex.join(text.strip().split("\t")) for _, text in lines]
        return process, ran, seen, int(lines[-1][0]) if lines else None

    return call


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        ([], ["djl-neuronx check", "djl-neuronx serve"]),
        (["serve"], ["djl-neuronx check", "djl-neuronx serve"]),
        (["serve", "/a", "/b b"], ["djl-neuronx check /a '/b b'", "djl-neuronx serve /a '/b b'"]),
        (["serve", "/m", "--drain", "5"], ["djl-neuronx serve /m --drain 5"]),
        (["check", "/m", "--json"], ["djl-neuronx check /m --json"]),
        (["compile", "m", "--output", "s3://b/f"], ["djl-neuronx compile m --output s3://b/f"]),
        (["--version"], ["djl-neuronx --version"]),
        (["--model-id", "a/b"], ["djl-neuronx serve --model-id a/b"]),
        (["other", "a b"], ["other 'a b'"]),
    ],
)
def test_entrypoint(start, words, ran):
    process, lines, _, pid = start("entrypoint.sh", *words)
    assert (process.returncode, lines) == (0, ran)
    assert pid == process.pid, "a shell stands between the container's signals and the server"


def test_entrypoint_has_every_command():
    (commands,) = (a.choices for a in _parser()._actions if a.dest == "command")
    script = (DOCKER / "entrypoint.sh").read_text()
    cases = re.findall(r"^([\w |*-]+)\)", script, re.MULTILINE)
    named = {word for case in cases for word in case.split(" | ")}
    assert set(commands) <= named


def test_an_impossible_plan_ends_the_start(start):
    process, lines, _, _ = start("entrypoint.sh", environ={"CHECKED": "1"})
    assert (process.returncode, lines) == (1, ["djl-neuronx check"])
    process, lines, _, _ = start(
        "entrypoint.sh", environ={"CHECKED": "1", "DJL_NEURONX_CHECK": "false"}
    )
    assert (process.returncode, lines) == (0, ["djl-neuronx serve"])


def test_a_stop_during_the_check_is_one(start):
    def stop(process, log):
        wait_until(lambda: "check" in log.read_text())
        process.send_signal(signal.SIGTERM)

    process, lines, _, _ = start("entrypoint.sh", environ={"SLOW": "2"}, after=stop)
    assert (process.returncode, lines) == (143, ["djl-neuronx check"])


class TestDjl:
    def test_serve(self, start):
        process, lines, seen, pid = start("entrypoint-djl.sh", "serve")
        assert (process.returncode, lines, pid) == (0, ["serving"], process.pid)
        assert seen["SERVING_INFERENCE_ADDRESS"] == "http://0.0.0.0:8080"
        assert seen["SERVING_MANAGEMENT_ADDRESS"] == "http://127.0.0.1:8081"
        assert seen["OPTION_ASYNC_MODE"] == "true"

    def test_the_port_of_sagemaker(self, start):
        environ = {"SAGEMAKER_BIND_TO_PORT": "9000", "SAGEMAKER_MULTI_MODEL": "true"}
        _, _, seen, _ = start("entrypoint-djl.sh", environ=environ)
        assert seen["SERVING_INFERENCE_ADDRESS"] == "http://0.0.0.0:9000"
        assert seen["SERVING_MANAGEMENT_ADDRESS"] == "http://0.0.0.0:9000"
        assert (
            "OPTION_ASYNC_MODE" not in seen
        )  # a model that is unloaded would stay for the life of Java

    def test_beside_other_containers_it_takes_the_ports_that_are_its_own(self, start):
        environ = {"SAGEMAKER_BIND_TO_PORT": "9000", "SAGEMAKER_SAFE_PORT_RANGE": "9000-9009"}
        _, _, seen, _ = start("entrypoint-djl.sh", environ=environ)
        assert seen["SERVING_INFERENCE_ADDRESS"] == "http://0.0.0.0:9000"
        assert seen["SERVING_MANAGEMENT_ADDRESS"] == "http://127.0.0.1:9009"

    @pytest.mark.parametrize(
        ("environ", "files", "asynchronous"),
        [
            ({"OPTION_ROLLING_BATCH": "tnx"}, {}, None),
            ({"OPTION_ROLLING_BATCH": "auto"}, {}, "true"),
            ({"OPTION_ROLLING_BATCH": "disable"}, {}, None),
            ({}, {"a/serving.properties": "option.rolling_batch=disable\nbatch_size=8"}, None),
            ({"OPTION_ROLLING_BATCH": "disable", "OPTION_ASYNC_MODE": "false"}, {}, "false"),
            ({}, {"serving.properties": "engine=Python\noption.rolling_batch = tnx\n"}, None),
            ({}, {"a/serving.properties": "option.rolling_batch:neuronx"}, None),
            ({}, {"a/serving.properties": "#option.rolling_batch=tnx"}, "true"),
            ({}, {"serving.properties": "option.rolling_batch=auto\r\n"}, "true"),
        ],
    )
    def test_async_mode_is_the_default_without_a_rolling_batch(
        self, start, tmp_path, environ, files, asynchronous
    ):
        for name, text in files.items():
            file = tmp_path / "a store" / name
            file.parent.mkdir(parents=True)
            file.write_bytes(text.encode())
        _, _, seen, _ = start("entrypoint-djl.sh", environ=environ)
        assert seen.get("OPTION_ASYNC_MODE") == asynchronous

    def test_defaults_are_those_of_docs_and_of_lmis_container(self):
        image = replay.Image(env={"PATH": ""})
        replay.env(image, ROOT, last("djl", "ENV"))
        assert image.env["SERVING_RETRY_THRESHOLD"] == "3"
        assert image.env["SERVING_MIN_WORKERS"] == image.env["SERVING_MAX_WORKERS"] == "1"
        assert image.env["OPTION_ENTRYPOINT"] == "djl_python_neuronx.handler"
        assert int(image.env["MODEL_LOADING_TIMEOUT"]) == 1200
        assert int(image.env["PREDICT_TIMEOUT"]) == 240

    def test_other_commands(self, start):
        assert start("entrypoint-djl.sh", "check", "/m")[1] == ["djl-neuronx check /m"]


@pytest.mark.parametrize("status", [200, 503, None])
def test_health(status):
    class Ping(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/ping" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Ping) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_port
        if status is None:
            server.shutdown()
            server.server_close()
        environ = {**os.environ, "SAGEMAKER_BIND_TO_PORT": str(port)}
        command = [sys.executable, DOCKER / "healthcheck.py"]
        ran = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False)
        server.shutdown()
        thread.join()
    assert (ran.returncode == 0) == (status == 200)


def test_dependencies_are_those_of_the_package(tmp_path):
    for file in (ROOT / "pyproject.toml", DOCKER / "dependencies.py"):
        shutil.copy(file, tmp_path)
    script = tmp_path / "dependencies.py"

    def lines(*extras):
        command = [sys.executable, script, *extras]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    assert {"transformers>=4.45", "orjson>=3.9.15"} <= set(lines())
    assert set(lines("s3", "check")) - set(lines()) == {"boto3>=1.34,<1.45", "rich>=13"}


def test_the_compose_file_of_the_readme():
    """It has what the images expect: folders to write to, and time to end what runs."""
    text = (DOCKER / "README.md").read_text()
    (compose,) = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    (service,) = compose["services"].values()
    assert service["image"] == "djl-python-neuronx:nxdi"
    drain = _parser().parse_args(["serve"]).drain
    assert int(service["stop_grace_period"].removesuffix("s")) > drain + 2
    assert service["read_only"]
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert {volume.split(":")[1] for volume in service["volumes"]} == {
        "/opt/ml/model",
        "/tmp/cache",
    }


class Replayed:
    """An image whose steps were run, with the example model."""

    def __init__(self, name, folder):
        self.name, self.root, self.command = name, folder / "root", str(folder / "run")
        line = [DOCKER / "replay.sh", name, folder]
        self.said = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout
        shutil.copytree(ROOT / "examples/tiny-llama", folder / "ml/model")
        self.environ = {"OPT_ML": str(folder / "ml"), "SAGEMAKER_BIND_TO_PORT": "18082"}

    def run(self, *words, **environ):
        """Exit status and output."""
        ran = subprocess.run(
            [self.command, *words],
            env={**os.environ, **self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return ran.returncode, ran.stdout


@pytest.fixture(scope="session")
def wheel():
    """The version of the wheel that the images get, made anew."""
    command = ["make", "dist", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (made,) = ROOT.glob("dist/*.whl")
    return made.name.split("-")[1]


@pytest.fixture(scope="session")
def image(wheel, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    faulthandler.cancel_dump_traceback_later()  # pytest's own, after 5 min: a replay takes longer on a busy machine
    yield Replayed(request.param, folder)
    shutil.rmtree(folder)  # gigabytes


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for debootstrap and chroot")
class TestReplayed:
    """The images that .ci/run does not replay. djl starts from cpu, which it does replay."""

    @pytest.mark.parametrize("image", ["djl", "nxdi", "tnx"], indirect=True)
    def test_what_was_run(self, image, wheel):
        left_out = [line for line in image.said.splitlines() if line.startswith("not run: ")]
        own = [line for line in left_out if line.startswith(f"not run: {image.name} ")]
        assert len(own) == (1 if image.name == "djl" else 3)
        assert len(left_out) == len(own) + (image.name != "djl")  # Debian in place of Ubuntu
        bom = json.loads((image.root / "sbom.json").read_text())
        versions = {part["name"]: part["version"] for part in bom["components"]}
        assert versions["djl-python-neuronx"] == wheel
        assert "transformers" in versions
        status, report = image.run("check", "--instance", "inf2.xlarge")
        assert (status, "\n  ready" in report) == (0, True), report

    @pytest.mark.parametrize("image", ["djl"], indirect=True)
    def test_a_compile_job(self, image, bucket, moto):
        line = ["compile", "/opt/ml/model", "--output", "s3://models/tiny", "--weights", "copy"]
        status, log = image.run(*line, **KEYS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{moto}")
        assert status == 0, log
        names = {found["Key"] for found in bucket.list_objects_v2(Bucket="models")["Contents"]}
        assert {"tiny/manifest.json", "tiny/model.safetensors", "tiny/serving.properties"} <= names

    @pytest.mark.parametrize("image", ["djl"], indirect=True)
    def test_djl_serving(self, image, monkeypatch):
        home = os.environ.get("DJL_SERVING_HOME")
        if home is None:
            status, log = image.run("serve")
            assert status == 127
            assert "serving: not found" in log
            assert "openjdk version" in image.run("java", "-version")[1]
            return
        shutil.copytree(home, image.root / "opt/djl-serving", dirs_exist_ok=True)
        for name, value in image.environ.items():
            monkeypatch.setenv(name, value)
        url = f"http://127.0.0.1:{image.environ['SAGEMAKER_BIND_TO_PORT']}"
        with known_answers.served(url, [image.command]):
            assert known_answers.differences(url) == []
