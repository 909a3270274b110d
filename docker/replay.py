"""Runs the steps of a Dockerfile in a Debian root, and runs the result: see replay.sh. Needs root, and no Docker.

The root is made by debootstrap with the Debian mirror of this machine; pip uses this machine's settings and cache. What
differs from Docker: the base is Debian 12 whatever FROM names, the network and /dev are this machine's, and a running
image has only /tmp to write to. An instruction or form that is not known here is an error.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

DOCKER = Path(__file__).parent
CONTEXT = DOCKER.parent
DEBIAN = "bookworm"
OWN_IMAGE = "djl-python-neuronx:"
PASSED_ON = ("SAGEMAKER_", "OPTION_", "HF_", "SERVING_", "AWS_", "NEURON_", "DJL_")
CA = "/run/replay-ca.crt"
SKIPPED = {
    "repos.neuron.amazonaws.com": "AWS's repositories cannot be reached from where this is replayed",
    "publish.djl.ai": "the server is not on Maven Central, and publish.djl.ai cannot be reached",
}
"""A part of the text of each step that is not run, and why."""
GIVEN = {"TORCH_ARGS": os.environ.get("PIP_ARGS", ""), "BACKEND": "cpu"}
"""Build arguments of a replay: torch comes from where the Makefile takes it."""


class ReplayError(Exception):
    """A Dockerfile, a step or this machine is not what a replay needs; the message is for the user."""


@dataclass
class Image:
    """A Dockerfile's instructions for running the result, and the variables while its steps run."""

    name: str = ""
    """Of its Dockerfile; that of the image below, if it starts from one of ours."""

    env: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        }
    )
    args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)

    def expand(self, text: str) -> str:
        """Replace `$NAME` and `${NAME}`; an unknown one is an error, where Docker would take an empty text."""
        known = {**self.args, **self.env}

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name not in known:
                raise ReplayError(f"{name} has no value in: {text}")
            return known[name]

        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and text of each instruction, with continuation lines joined and comments removed."""
    found, part = [], ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or not (part or line.strip()):
            continue
        part += line
        if line.endswith("\\"):
            part = part[:-1]
            continue
        name, _, rest = part.strip().partition(" ")
        if "<<" in rest:
            raise ReplayError(f"here-documents are not known here: {name} {rest}")
        found.append((name.upper(), rest.strip()))
        part = ""
    if part:
        raise ReplayError(f"the last line continues: {part}")
    return found


def flags(text: str) -> tuple[list[tuple[str, str]], str]:
    """The `--name=value` at the beginning, and the rest."""
    found = []
    while match := re.match(r"--([\w-]+)=(\S+)\s+", text):
        found.append((match[1], match[2]))
        text = text[match.end() :]
    return found, text


def command(text: str) -> list[str]:
    """A command in its JSON form; another form would put a shell before the server."""
    try:
        words = json.loads(text)
    except ValueError as error:
        raise ReplayError(f"not a JSON list: {text}") from error
    return [str(word) for word in words]


def in_context(source: str) -> list[Path]:
    """Files of the build context: .dockerignore excludes everything, and lists exceptions."""
    text = (CONTEXT / ".dockerignore").read_text()
    everything, *lines = [line for line in text.splitlines() if not line.startswith("#")]
    if everything != "*" or not all(line.startswith("!") for line in lines):
        raise ReplayError(".dockerignore: expected `*`, then only exceptions")
    sent = {file for line in lines for file in CONTEXT.glob(line[1:])}
    found = sorted(CONTEXT.glob(source))
    found = [path for path in found if path in sent or any(path in file.parents for file in sent)]
    if not found:
        raise ReplayError(
            f"{source}: not in the build context; {CONTEXT} has none, or .dockerignore leaves it out"
        )
    return found


def copy(image: Image, root: Path, text: str) -> None:
    """Do what COPY says."""
    options, rest = flags(text)
    *sources, target = shlex.split(image.expand(rest))
    mode = dict(options).pop("chmod", None)
    if [name for name, _ in options] not in ([], ["chmod"]):
        raise ReplayError(f"only --chmod is known of COPY's flags: {text}")
    files = [file for source in sources for file in in_context(source)]
    if len(files) > 1 and not target.endswith("/"):
        raise ReplayError(f"several files need a folder, with / at its end: {text}")
    for file in files:
        if file.is_dir():
            raise ReplayError(f"{file} is a folder, which COPY copies here as files only")
        path = Path(f"{root}{Path(image.workdir, target)}")
        path = path / file.name if target.endswith("/") else path
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)
        path.chmod(int(mode, 8) if mode else file.stat().st_mode & 0o777)


def run(image: Image, root: Path, text: str) -> None:
    """Do what RUN says."""
    options, rest = flags(text)
    binds = [(CA, ca_bundle())]
    for name, value in options:
        mount = {key: text for key, _, text in (part.partition("=") for part in value.split(","))}
        if name == "mount" and mount.keys() == {"type", "target"} and mount["type"] == "cache":
            binds.append((mount["target"], cache(mount["target"])))
        elif (
            name == "mount"
            and mount.keys() == {"type", "source", "target"}
            and mount["type"] == "bind"
        ):
            (source,) = in_context(mount["source"])
            binds.append((mount["target"], str(source)))
        else:
            raise ReplayError(f"not known here: RUN --{name}={value}")
    words = command(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
    env = {**image.args, **image.env, **host_settings()}
    job = {
        "root": str(root),
        "binds": binds,
        "env": env,
        "user": image.user,
        "workdir": image.workdir,
    }
    within = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    ran = subprocess.run([*within, *enter(job, words)], check=False)
    if ran.returncode:
        raise ReplayError(f"exit status {ran.returncode}: RUN {text}")


def enter(job: dict[str, object], words: list[str]) -> list[str]:
    """A command line that runs another one in a root; see `_enter`."""
    return [sys.executable, __file__, "enter", json.dumps(job), *words]


def _enter(job: dict[str, object], words: list[str]) -> None:
    """Become a command in a root, in its own mount namespace."""
    root = str(job["root"])

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True)

    mount("--bind", root, root)
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("--rbind", "/dev", f"{root}/dev")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", f"{root}/dev/shm")
    mount("-t", "tmpfs", "tmpfs", f"{root}/run")
    for target, source in job["binds"]:
        path = Path(f"{root}{target}")
        if Path(source).is_dir():
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        mount("--rbind", source, str(path))
    if job.get("read_only"):
        mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", f"{root}/tmp")
        mount("-o", "remount,bind,ro", root)
    uid, gid = map(int, str(job["user"]).split(":"))
    os.chroot(root)
    os.chdir(str(job["workdir"]))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.umask(0o022)
    env = dict(job["env"])
    os.execvpe(words[0], words, env)


def output(*line: str, cwd: str | None = None, env: dict[str, str] | None = None) -> str:
    """The output of a program of this machine; the error of a failed one quotes it."""
    try:
        ran = subprocess.run(line, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError as error:
        raise ReplayError(f"{line[0]} not found; this needs a Debian with apt and pip") from error
    if ran.returncode:
        raise ReplayError(f"{shlex.join(line)}: exit status {ran.returncode}\n{ran.stdout[-2000:]}")
    return ran.stdout


def ca_bundle() -> str:
    """This machine's certificates: those that it reaches its registries with."""
    paths = ssl.get_default_verify_paths()
    for path in (os.environ.get("PIP_CERT"), paths.cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if path and Path(path).is_file():
            return path
    raise ReplayError("no bundle of certificates found; name one with SSL_CERT_FILE")


def host_settings() -> dict[str, str]:
    """How this machine reaches its registries: pip's settings and proxies, as variables."""
    found = {}
    for line in output(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in ("index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout"):
            found[f"PIP_{key.upper().replace('-', '_')}"] = value.strip("'")
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return {
        **found,
        **proxies,
        "PIP_CERT": CA,
        "SSL_CERT_FILE": CA,
        "DEBIAN_FRONTEND": "noninteractive",
    }


def cache(target: str) -> str:
    """The folder of this machine that a cache of the build stands for."""
    if target != "/root/.cache/pip":
        raise ReplayError(f"no folder of this machine is known for the cache {target}")
    found = output(sys.executable, "-m", "pip", "cache", "dir").strip()
    Path(found).mkdir(parents=True, exist_ok=True)
    return found


def debootstrap(root: Path) -> None:
    """Make a Debian, with the mirror and settings of this machine's apt."""
    with tempfile.TemporaryDirectory() as work:
        # Lists of its own: a new machine may have none, an old one those of packages that are gone.
        own = [f"-oDir::State::lists={work}", f"-oDir::Cache={work}", "-oAPT::Sandbox::User=root"]
        apt = partial(output, "apt-get", *own, cwd=work)
        apt("update")
        form = "--format=$(ORIGIN) $(REPO_URI) $(CODENAME) $(COMPONENT)"
        listed = apt("indextargets", form, "Created-By: Packages").splitlines()
        rows = {tuple(line.split()) for line in listed}
        sources = [
            row[1:] for row in sorted(rows) if row[0] == "Debian" and row[2].startswith(DEBIAN)
        ]
        mirrors = [
            uri for uri, suite, component in sources if (suite, component) == (DEBIAN, "main")
        ]
        mirror = mirrors[0] if mirrors else "http://deb.debian.org/debian"
        sources = sources or [(mirror, DEBIAN, "main")]
        program, env = shutil.which("debootstrap"), dict(os.environ)
        if program is None:
            apt("download", "debootstrap")
            subprocess.run(["dpkg", "-x", *Path(work).glob("*.deb"), work], check=True)
            program = f"{work}/usr/sbin/debootstrap"
            env["DEBOOTSTRAP_DIR"] = f"{work}/usr/share/debootstrap"
        output(program, "--variant=minbase", DEBIAN, str(root), mirror, env=env)
    lines = [f"deb {' '.join(source)}\n" for source in sources]
    (root / "etc/apt/sources.list").write_text("".join(lines))
    kept = ("Acquire::http", "Acquire::Check-")
    settings = [line for line in output("apt-config", "dump").splitlines() if line.startswith(kept)]
    settings.append(f'Acquire::https::CaInfo "{CA}";')
    (root / "etc/apt/apt.conf.d/99replay").write_text("\n".join(settings) + "\n")
    for name in ("hosts", "resolv.conf"):
        shutil.copyfile(f"/etc/{name}", root / "etc" / name)


def pins(name: str = "") -> dict[str, str]:
    """The versions in versions.env, and those of the SDK of an image, if it has one: `SDK`, else its own."""
    found = read_pins("versions.env")
    sdk = os.environ.get("SDK") or found.get(f"{name}_SDK")
    return {**found, **read_pins(f"sdk-{sdk}.env")} if sdk else found


def read_pins(file: str) -> dict[str, str]:
    """The versions in a file of docker/."""
    lines = (DOCKER / file).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def skips(kind: str, text: str) -> str | None:
    """The reason to skip a step; None if it runs."""
    if kind not in ("ADD", "RUN"):
        return None
    return next((reason for part, reason in SKIPPED.items() if part in text), None)


def replay(name: str, folder: Path, skipped: list[str]) -> Image:
    """Run the steps of an image in `folder`/root. `skipped` gets those that are not run, with the reason."""
    steps = instructions((DOCKER / f"Dockerfile.{name}").read_text())
    image = Image(name)
    for at, (kind, text) in enumerate(steps):
        sys.stderr.write(f"[{name} {at + 1}/{len(steps)}] {kind} {text}\n")
        if reason := skips(kind, text):
            skipped.append(f"{name} {at + 1}: {kind} {text[:100]}…: {reason}")
        elif kind == "FROM":
            image = start(image.expand(text), name, folder, skipped)
        elif kind in FACTS:
            image.expand(text)
        elif kind in STEPS:
            STEPS[kind](image, folder / "root", text)
        else:
            raise ReplayError(f"{kind} is not known here")
    return image


def start(base: str, name: str, folder: Path, skipped: list[str]) -> Image:
    """The image that FROM names: one of docker/, or Debian in place of any other."""
    if base.startswith(OWN_IMAGE):
        return replay(base.removeprefix(OWN_IMAGE), folder, skipped)
    if not base.startswith(f"debian:{DEBIAN}"):
        skipped.append(f"FROM {base}: Debian's {DEBIAN} in its place")
    debootstrap(folder / "root")
    return Image(name)


def argument(image: Image, root: Path, text: str) -> None:
    """Do what ARG says: a value comes from the pins or `GIVEN`, else from the Dockerfile."""
    name, equals, default = text.partition("=")
    given = {**pins(image.name), **GIVEN}
    if name not in given and not equals:
        raise ReplayError(f"ARG {name} has no value: neither pinned nor in the Dockerfile")
    image.args[name] = given.get(name, image.expand(" ".join(shlex.split(default))))


def workdir(image: Image, root: Path, text: str) -> None:
    """Do what WORKDIR says."""
    image.workdir = image.expand(text)
    Path(f"{root}{image.workdir}").mkdir(parents=True, exist_ok=True)


def user(image: Image, root: Path, text: str) -> None:
    """Do what USER says. Numbers: Kubernetes cannot see that a name is not root's."""
    image.user = image.expand(text)
    if not re.fullmatch(r"\d+:\d+", image.user):
        raise ReplayError(f"USER {text}: expected numbers, as in 10001:10001")


def entrypoint(image: Image, root: Path, text: str) -> None:
    """Do what ENTRYPOINT says."""
    image.entrypoint, image.cmd = command(text), []


def cmd(image: Image, root: Path, text: str) -> None:
    """Do what CMD says."""
    image.cmd = command(text)


def env(image: Image, root: Path, text: str) -> None:
    """Do what ENV says."""
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise ReplayError(f"expected NAME=value, found {word!r} in: {text}")
        image.env[name] = image.expand(value)


STEPS = {
    "ARG": argument,
    "CMD": cmd,
    "COPY": copy,
    "ENTRYPOINT": entrypoint,
    "ENV": env,
    "RUN": run,
    "USER": user,
    "WORKDIR": workdir,
}
FACTS = ("EXPOSE", "HEALTHCHECK", "LABEL", "STOPSIGNAL")
"""Instructions that only Docker and its users read: here only their variables must have values."""


def build(name: str, folder: Path) -> None:
    """Replay an image into `folder`, and write `folder`/run."""
    if os.geteuid() != 0:
        raise ReplayError("needs root, for debootstrap and chroot")
    if (folder / "root").exists():
        raise ReplayError(f"{folder / 'root'} exists; name another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    skipped: list[str] = []
    image = replay(name, folder, skipped)
    (folder / "image.json").write_text(json.dumps(asdict(image), indent=2))
    (folder / "run").write_text(
        "#!/bin/sh\n"
        "# Runs the image with $OPT_ML as its /opt/ml; in this process, so that its signals are the image's.\n"
        f'exec {shlex.quote(sys.executable)} {shlex.quote(__file__)} run {shlex.quote(str(folder))} "$@"\n'
    )
    (folder / "run").chmod(0o755)
    lines = [f"not run: {line}" for line in skipped] or ["every step was run"]
    sys.stdout.write("\n".join([*lines, f"{name}: {folder / 'run'}"]) + "\n")


def run_image(folder: Path, words: list[str]) -> None:
    """Become the image's entrypoint, with a root that cannot be written to, but for /tmp."""
    image = Image(**json.loads((folder / "image.json").read_text()))
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    opt_ml = os.environ.get("OPT_ML")
    job = {
        "root": str(folder / "root"),
        "binds": [("/opt/ml", opt_ml)] if opt_ml else [],
        "env": {**image.env, **passed},
        "user": image.user,
        "workdir": image.workdir,
        "read_only": True,
    }
    line = ["unshare", "--mount", *enter(job, [*image.entrypoint, *(words or image.cmd)])]
    os.execvp(line[0], line)


def main(arguments: list[str]) -> int:
    """Run a command and return the exit status."""
    match arguments:
        case ["build", name, folder] if (DOCKER / f"Dockerfile.{name}").is_file():
            build(name, Path(folder).absolute())
        case ["run", folder, *words]:
            run_image(Path(folder), words)
        case ["enter", job, *words]:
            _enter(json.loads(job), words)
        case _:
            images = "|".join(sorted(path.suffix[1:] for path in DOCKER.glob("Dockerfile.*")))
            raise ReplayError(f"usage: docker/replay.sh {images} DIR")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ReplayError as error:
        sys.exit(f"replay: {error}")
