"""The wheel, the sdist and their version, built from copies of this checkout; the audit of what they need."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path

import pytest

from tools import audit, release

pytest.importorskip("hatch_vcs", reason="needs the `dev` extra")
if not shutil.which("git"):
    pytest.skip("git is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[1]
# What the version depends on, and what the metadata name.
PROJECT = (
    "pyproject.toml",
    ".git_archival.txt",
    ".gitattributes",
    "README.md",
    "LICENSE",
    "NOTICE",
)


def git(folder: Path, *arguments: str) -> str:
    settings = ("user.name=a", "user.email=a@b.org", "commit.gpgsign=false", "safe.directory=*")
    command = ["git", *(part for one in settings for part in ("-c", one)), *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def hatchling(folder: Path, *arguments: str, **environ: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "hatchling", *arguments]
    own = {**os.environ, "DJL_NEURONX_NATIVE": "", "SOURCE_DATE_EPOCH": "1795000000", **environ}
    ran = subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def repository(folder: Path, names: list[str] | tuple[str, ...]) -> Path:
    for name in names:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place)
    git(folder, "init", "-q")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-qm", "all")
    return folder


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of this checkout, and those that the next commit adds."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = git(ROOT, "ls-files", "-z", "-co", "--exclude-standard").split("\0")
    return [name for name in listed if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist of a checkout at a tag, in which other things lie about."""
    folder = repository(tmp_path_factory.mktemp("checkout"), tracked)
    git(folder, "tag", "v9.8.7")
    for name in ("credentials.txt", "notes/plan.md", ".venv-x/lib.py", "tests/__pycache__/a.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    hatchling(folder, "build", "-d", str(folder / "dist"))
    hatchling(folder, "build", "-t", "wheel", "-d", str(folder / "pure"), CC="no-such-compiler")
    return folder / "dist"


def test_the_wheel_has_the_package_and_the_docs_alone(built: Path, tracked: list[str]) -> None:
    (pure,) = built.with_name("pure").iterdir()
    assert pure.name == "djl_python_neuronx-9.8.7-py3-none-any.whl"
    with zipfile.ZipFile(pure) as wheel:
        names = wheel.namelist()
        metadata = BytesParser().parsebytes(
            wheel.read("djl_python_neuronx-9.8.7.dist-info/METADATA")
        )
        scripts = wheel.read("djl_python_neuronx-9.8.7.dist-info/entry_points.txt").decode()
    package = {name for name in names if not name.startswith("djl_python_neuronx-9.8.7.dist-info/")}
    docs = {f"djl_python_neuronx/{name}" for name in tracked if name.startswith("docs/")}
    assert docs
    assert package == docs | {name for name in tracked if name.startswith("djl_python_neuronx/")}
    assert "djl_python_neuronx/py.typed" in package
    assert {
        f"djl_python_neuronx-9.8.7.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")
    } <= {*names}
    assert metadata["License-Expression"] == "Apache-2.0 AND CC-BY-SA-4.0"
    assert {"cpu", "server", "s3", "check"} <= set(metadata.get_all("Provides-Extra"))
    assert "djl-neuronx = djl_python_neuronx.cli:main" in scripts
    (whole,) = built.glob("*.whl")
    if shutil.which("cc") and sys.platform == "linux":
        platform = sysconfig.get_platform().replace("-", "_")
        assert whole.name == f"djl_python_neuronx-9.8.7-py3-none-{platform}.whl"
        package.add("djl_python_neuronx/engine/_sampling.so")
    with zipfile.ZipFile(whole) as wheel:
        there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert there == package


def test_the_sdist_has_what_git_has(built: Path, tracked: list[str]) -> None:
    """So its tests run. Whoever adds a folder to the repository adds it to pyproject.toml."""
    with tarfile.open(built / "djl_python_neuronx-9.8.7.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - {"PKG-INFO"} == set(tracked)


def test_the_version_is_the_tags_wherever_it_is_built(built: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(built / "djl_python_neuronx-9.8.7.tar.gz", tmp_path)
    assert hatchling(tmp_path / "djl_python_neuronx-9.8.7", "version") == "9.8.7"

    checkout, source, shallow = (tmp_path / name for name in ("checkout", "source", "shallow"))
    repository(checkout, PROJECT)
    bare = tmp_path / "bare"
    shutil.copytree(checkout, bare, ignore=shutil.ignore_patterns(".git"))
    assert hatchling(bare, "version") == "0.0"
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", hatchling(checkout, "version"))

    git(checkout, "tag", "v1.2.3")
    git(checkout, "archive", "-o", str(tmp_path / "source.tar"), "v1.2.3")
    shutil.unpack_archive(tmp_path / "source.tar", source)
    assert hatchling(source, "version") == "1.2.3"

    git(checkout, "commit", "-qm", "more", "--allow-empty")
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]+", hatchling(checkout, "version"))
    git(tmp_path, "clone", "-q", "--depth=1", checkout.as_uri(), str(shallow))
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", hatchling(shallow, "version"))


def test_the_same_commit_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """In another folder, with other times and modes of files."""

    def digests(folder: Path) -> dict[str, str]:
        files = (path for path in folder.iterdir() if path.suffix in {".whl", ".gz"})
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    other = tmp_path / "other"
    command = ("umask 077; git clone -q", shlex.quote(str(built.parent)), shlex.quote(str(other)))
    subprocess.run(["sh", "-c", " ".join(command)], check=True)
    hatchling(other, "build", "-d", str(other / "dist"))
    assert len(digests(built)) == 2
    assert digests(other / "dist") == digests(built)


def test_a_release_is_of_a_tag_without_changes(tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("## Unreleased\n\n## 1.2.3 - 2026-12-31\n")
    repository(tmp_path, [])

    def refused() -> str:
        with pytest.raises(release.ReleaseError) as error:
            release.source(tmp_path, is_snapshot=False)
        return str(error.value)

    assert "has no tag" in refused()
    snapshot = release.source(tmp_path, is_snapshot=True)
    assert snapshot.tag == ""
    git(tmp_path, "tag", "v1.2.4")
    assert "CHANGELOG.md has no line '## 1.2.4 - " in refused()
    git(tmp_path, "tag", "-d", "v1.2.4")
    git(tmp_path, "tag", "v1.2.3")
    found = release.source(tmp_path, is_snapshot=False)
    assert (found.commit, found.tag) == (git(tmp_path, "rev-parse", "HEAD").strip(), "v1.2.3")
    assert found.epoch == git(tmp_path, "show", "-s", "--format=%ct").strip()
    (tmp_path / "new.py").touch()
    assert "new.py" in refused()
    (tmp_path / "new.py").unlink()
    git(
        tmp_path,
        "tag",
        "-a",
        "v1.2.4rc1",
        "-m",
        "the version of the files: annotated tags come first",
    )
    assert "CHANGELOG.md has no line '## 1.2.4rc1 - " in refused()
    git(tmp_path, "tag", "-d", "v1.2.4rc1")
    changelog.write_text("")
    assert "the checkout has changes" in refused()
    changed = release.source(tmp_path, is_snapshot=True)
    assert (changed.tag, changed.is_changed, found.is_changed) == ("", True, False)
    with pytest.raises(release.ReleaseError, match="not a git repository"):
        release.source(Path("/"), is_snapshot=True)


def assert_described(folder: Path, commit: str, tag: str) -> None:
    """SHA256SUMS is one of coreutils, and the statement is SLSA's: https://slsa.dev/spec/v1.0/provenance."""
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(command, cwd=folder, check=True)
    listed = {line[66:] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    (path,) = folder.glob("*.intoto.json")
    statement = json.loads(path.read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {one["name"] for one in statement["subject"]} == listed - {path.name}
    for one in statement["subject"]:
        content = (folder / one["name"]).read_bytes()
        assert one["digest"] == {"sha256": hashlib.sha256(content).hexdigest()}
    definition = statement["predicate"]["buildDefinition"]
    assert ":" in definition["buildType"]
    assert ":" in statement["predicate"]["runDetails"]["builder"]["id"]
    assert definition["externalParameters"]["tag"] == tag
    sources = [one for one in definition["resolvedDependencies"] if "digest" in one]
    assert [one["digest"] for one in sources] == [{"gitCommit": commit}]
    assert [one["annotations"] for one in sources] == [{"changed": False}]


def test_provenance_and_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "BUILDERS", ("pytest",))  # the others are the releaser's
    (tmp_path / "djl_python_neuronx-1.2.3-py3-none-manylinux_2_17_x86_64.whl").write_bytes(b"a")
    (tmp_path / "djl_python_neuronx-1.2.3.tar.gz").write_bytes(b"b")
    release.write(release.Source("c" * 40, "v1.2.3", "1"), tmp_path)
    assert_described(tmp_path, "c" * 40, "v1.2.3")
    with pytest.raises(release.ReleaseError, match=r"v1.2.2, and the files have the version 1.2.3"):
        release.write(release.Source("c" * 40, "v1.2.2", "1"), tmp_path)
    changed = release.provenance(release.Source("c" * 40, "", "1", is_changed=True), {})
    definition = changed["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["command"] == "make release ARGS=--snapshot"
    assert definition["resolvedDependencies"][0]["annotations"] == {"changed": True}


def test_metadata_of_a_package_that_is_not_installed(tmp_path: Path) -> None:
    """An item of `pip install --report`: https://pip.pypa.io/en/stable/reference/installation-report/."""
    sha = {"sha256": "0" * 64}
    given = {"name": "A", "version": "1", "license": "Use\n\nit: freely", "description": "# A\n\nb"}
    given |= {"requires_dist": ["b>=1", "c; extra == 'd'"], "provides_extra": ["d"]}
    for url in ("https://example.org/A.whl", "file:///home/me/A.whl"):
        folder = tmp_path / url.partition(":")[0]
        folder.mkdir()
        source = {"url": url, "archive_info": {"hashes": sha}}
        release._write_metadata(folder, {"metadata": given, "download_info": source})
        (found,) = metadata.distributions(path=[str(folder)])
        assert (found.name, found.version, found.requires) == ("A", "1", given["requires_dist"])
        assert found.metadata["License"].split() == ["Use", "it:", "freely"]
        assert found.metadata.get_all("Provides-Extra") == ["d"]
        origin = found.read_text("direct_url.json")
        assert (origin and json.loads(origin)) == (source if url.startswith("https") else None)


@pytest.mark.nightly
def test_a_release_by_its_command(tracked: list[str], tmp_path: Path) -> None:
    """Version 0.1.0 of a clone, as docs/releasing.md makes it; the wheels of two builds are the same bytes."""
    checkout = repository(tmp_path / "checkout", tracked)
    git(checkout, "tag", "v0.1.0")
    commit = git(checkout, "rev-parse", "HEAD").strip()
    pip_args = os.environ.get("PIP_ARGS", "")
    command = ["make", "release", f"PYTHON={sys.executable}", f"PIP_ARGS={pip_args}"]
    subprocess.run(command, cwd=checkout, check=True, timeout=1800)
    dist = checkout / "dist"
    assert_described(dist, commit, "v0.1.0")
    names = {path.name for path in dist.iterdir()}
    stem = "djl_python_neuronx-0.1.0"
    machine = sysconfig.get_platform().rpartition("-")[2]
    wheel = f"{stem}-py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
    made = {f"{stem}-py3-none-any.whl", wheel, f"{stem}.tar.gz"}
    boms = {f"{stem}.cdx.json", f"{stem}-extras.cdx.json"}
    assert names == made | boms | {f"{stem}.intoto.json", "SHA256SUMS"}
    components = {}
    for name in boms:
        bom = json.loads((dist / name).read_text())
        whole = bom["metadata"]["component"]
        assert (bom["bomFormat"], whole["name"], whole["version"]) == (
            "CycloneDX",
            "djl-python-neuronx",
            "0.1.0",
        )
        assert "file:" not in (dist / name).read_text()
        components[name] = {one["name"].lower() for one in bom["components"]}
    assert {"transformers", "pydantic", "tokenizers"} <= components[f"{stem}.cdx.json"]
    added = components[f"{stem}-extras.cdx.json"] - components[f"{stem}.cdx.json"]
    assert {"torch", "uvicorn", "boto3", "opentelemetry-sdk"} <= added

    with zipfile.ZipFile(dist / wheel) as archive:
        archive.extractall(tmp_path / "installed")
    script = (
        "import logging; logging.basicConfig(level='INFO');"
        "from djl_python_neuronx.engine import native; native.load(native.LIBRARY)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"sampling_with_kernel library={tmp_path / 'installed'}" in loaded.stderr

    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", checkout.as_uri(), str(other))
    script = (
        "import os, sys, pathlib, tools.release as r;"
        "os.umask(0o022); (to := pathlib.Path(sys.argv[1])).mkdir();"
        "own = {**os.environ, 'SOURCE_DATE_EPOCH': r.source(r.ROOT, is_snapshot=False).epoch};"
        "r.build(r.ROOT, to, own)"
    )
    tools = checkout / ".venv-tools" / "bin"
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(other)}
    environ["ZIG_GLOBAL_CACHE_DIR"] = str(tmp_path / "zig")
    again = tmp_path / "again"
    command = [str(tools / "python"), "-c", script, str(again)]
    subprocess.run(command, cwd=other, env=environ, check=True, timeout=600)
    assert {path.name for path in again.iterdir()} == made
    assert all((again / name).read_bytes() == (dist / name).read_bytes() for name in made)


def test_each_release_is_in_the_changelog() -> None:
    def unlisted(tags: str, changelog: str) -> list[str]:
        return [
            tag
            for tag in tags.split()
            if not re.search(rf"^## {re.escape(tag[1:])} - \d{{4}}-\d\d-\d\d$", changelog, re.M)
        ]

    assert unlisted("v1.2.3 v0.1.0", "## Unreleased\n\n## 0.1.0 - 2026-12-01\n") == ["v1.2.3"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased" in changelog
    assert not unlisted(git(ROOT, "tag", "--list", "v[0-9]*"), changelog)


AUDITED = {
    "name": "urllib3",
    "version": "2.8.0",
    "vulns": [
        {"id": "CVE-2099-1", "fix_versions": ["3.0.0"], "aliases": ["GHSA-x"], "description": "d"}
    ],
}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI: torch (2.13.0)"}


@pytest.mark.parametrize(
    ("pypi", "osv", "ignored", "status", "words"),
    [
        (
            [AUDITED, SKIPPED],
            None,
            {},
            1,
            ["VULNERABLE: urllib3 2.8.0: CVE-2099-1, GHSA-x", "3.0.0"],
        ),
        ([AUDITED, SKIPPED], None, {}, 1, ["not audited: Dependency not found on PyPI: torch"]),
        ([AUDITED], None, {"GHSA-x": "no proxies, 2026-11-23"}, 0, ["ignored: ", "no proxies"]),
        ([{**AUDITED, "vulns": []}], None, {}, 0, ["1 of "]),
        ([SKIPPED], [AUDITED], {}, 1, ["VULNERABLE: "]),
        ([SKIPPED], None, {}, 0, ["NOT AUDITED: "]),
        (None, None, {}, 0, ["NOT AUDITED: "]),
    ],
)
def test_an_audit_says_what_it_found_and_what_it_could_not_see(
    pypi, osv, ignored, status, words, tmp_path, monkeypatch, capsys
):
    """The answers of the stand-in are pip-audit 2.10's for these services."""
    command = tmp_path / "pip-audit"
    answers = {"pypi": pypi, "osv": osv}
    text = f"""#!{sys.executable}
import json, sys
(service,) = (part.partition("=")[2] for part in sys.argv if part.startswith("--vulnerability-service"))
assert "pydantic==" in open(sys.argv[-1]).read()
found = {answers!r}[service]
if found is None:
    sys.exit("Max retries exceeded")
print(json.dumps({{"dependencies": found, "fixes": []}}))
sys.exit(1)
"""
    command.write_text(text)
    command.chmod(0o755)
    monkeypatch.setattr(audit, "IGNORED", ignored)
    monkeypatch.setattr(audit, "EXTRAS", ("s3",))  # some environments of .ci/run have no torch
    assert audit.main(str(command)) == status
    said = capsys.readouterr().out
    assert all(word in said for word in words)
    assert ("NOT AUDITED" in said) == (words == ["NOT AUDITED: "])


def test_an_audit_is_of_what_the_package_needs_with_its_extras() -> None:
    def names(*extras: str) -> set[str]:
        return {line.partition("==")[0] for line in audit.dependencies(audit.PACKAGE, extras)}

    assert {"pydantic", "pydantic-core", "transformers"} <= names()
    assert not {"boto3", "starlette", "pytest", audit.PACKAGE} & names()
    assert {"boto3", "botocore", "urllib3"} <= names("s3")
