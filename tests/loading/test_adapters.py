"""Adapters of a model as a start and `check` find them: by options and beside the model, here, on the hub and in S3."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts import adapters
from djl_python_neuronx.backends.plan import LoraPlan
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import ArtifactError, ConfigError, ServingError
from djl_python_neuronx.loading.adapters import obtain
from djl_python_neuronx.loading.load_plan import load_plan
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.report import as_json
from djl_python_neuronx.planning.lora import MODULES
from tests.artifacts.test_adapters import FACTS
from tests.doubles.hub import Hub
from tests.doubles.lora_adapters import write_adapter
from tests.loading.checking import TINY, folder, printed, run

pytest_plugins = ["tests.doubles.s3_fixtures"]

OPTIONS = {"model_loader": "cpu", "enable_lora": "true"}


@pytest.fixture
def model(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(TINY, copy)
    return copy


def prepared(model, environ=(), **options):
    return prepare_or_raise(None, model, environ=dict(environ), overrides={**OPTIONS, **options})


def names(found):
    return [one.name for one in found.adapters]


def test_listed_ones_come_first_then_those_beside_the_model(model, tmp_path):
    for name in ("b", "a"):
        write_adapter(model / "adapters" / name, modules=("k_proj",))
    (model / "adapters" / ".ipynb_checkpoints").mkdir()
    write_adapter(tmp_path / "sql")
    found = prepared(model, adapters=f"z={tmp_path / 'sql'}")
    assert names(found) == ["z", "a", "b"]
    assert found.options.lora_target_modules == ("q_proj", "k_proj", "v_proj")
    plan = load_plan(found, lambda: None)
    folders = (tmp_path / "sql", model / "adapters" / "a", model / "adapters" / "b")
    assert plan.lora == LoraPlan(4, 16, ("q_proj", "k_proj", "v_proj"), adapters=folders)
    assert prepared(model, enable_lora="false").adapters == ()
    assert load_plan(prepared(model, enable_lora="false"), lambda: None).lora is None


def test_places_may_be_relative_to_the_model_folder_and_there_may_be_none(model):
    assert prepared(model).options.lora_target_modules == MODULES
    write_adapter(model / "mine" / "sql")
    assert names(prepared(model, adapters="sql=mine/sql")) == ["sql"]


@pytest.mark.parametrize(
    ("inside", "options", "problem"),
    [
        ({"a": {}}, {"adapters": "a=elsewhere"}, "two adapters are named 'a'"),
        ({"a b": {}}, {}, "'a b' cannot name an adapter"),
        ({"é": {}}, {}, "ASCII letters"),
        ({"a" * 129: {}}, {}, "at most 128 ASCII letters"),
        ({"model": {}}, {}, "'model' has the name of the model"),
        ({"chat": {}}, {"model_name": "llama,chat"}, "'chat' has the name of the model"),
        ({"a": {}, "b": {}}, {"max_loras": "1"}, "2 adapters (a, b), and max_loras is 1"),
        ({"a": {"rank": 17}}, {}, "its rank is 17, above max_lora_rank 16"),
        ({"a": {}}, {"lora_target_modules": "q_proj"}, "it changes v_proj"),
        ({}, {"lora_target_modules": "q_proj,c_attn"}, "lora_target_modules has c_attn"),
        ({}, {"adapters": "a=missing"}, "there is no folder 'missing' (from option.adapters"),
        ({"a": {"use_dora": True}, "b": {"bias": "all"}}, {}, "bias is 'all'"),
    ],
)
def test_what_is_wrong_is_an_error_before_anything_is_loaded(model, inside, options, problem):
    for name, fields in inside.items():
        write_adapter(model / "adapters" / name, **fields)
    with pytest.raises(ServingError) as caught:
        prepared(model, **options)
    assert problem in str(caught.value)
    assert isinstance(caught.value, (ArtifactError, ConfigError))


def test_check_lists_them_and_fetches_nothing(tmp_path):
    write_adapter(tmp_path / "adapters" / "sql", rank=8)
    report = run(folder(tmp_path), **OPTIONS, adapters="law=owner/law@v1")
    assert report.ok, [*report.findings]
    (law, sql) = as_json(report)["plan"]["adapters"]
    assert law == {"name": "law", "place": "owner/law@v1", "rank": 0, "modules": []}
    assert (sql["name"], sql["rank"], sql["modules"]) == ("sql", 8, ["q_proj", "v_proj"])
    text = printed(report)
    assert "law: not fetched (owner/law@v1)" in text
    assert "sql: rank 8, q_proj, v_proj" in text
    for place in (str(tmp_path / "none"), "./none", "none"):
        report = run(folder(tmp_path), **OPTIONS, adapters=f"law={place}")
        assert "there is no folder" in str([*report.findings])
        assert not report.ok
    write_adapter(tmp_path / "adapters" / "sql", rank=8, use_dora=True)
    assert "use_dora" in str([*run(folder(tmp_path), **OPTIONS).findings])


def test_other_backends(model):
    write_adapter(model / "adapters" / "sql")
    (model / "adapters" / "sql" / adapters.WEIGHTS).unlink()
    assert names(prepared(model, model_loader="sim", adapters="a=owner/a")) == ["a", "sql"]
    report = run(model, machine="inf2.xlarge", **{**OPTIONS, "model_loader": "tnx"})
    (error,) = report.findings.messages("error")
    assert "transformers-neuronx has no equivalent" in error


def files_of(adapter: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in adapter.iterdir()}


def test_one_of_the_hub_is_fetched_once_at_its_revision(model, tmp_path):
    hub = Hub()
    try:
        new = files_of(write_adapter(tmp_path / "new"))
        hub.models["owner/sql"] = {**new, "README.md": b"x", "optimizer.pt": b"x", "run.py": b"x"}
        environ = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "PATH": os.environ["PATH"],
        }
        found = prepared(model, environ, adapters="sql=owner/sql@v2")
        assert {path.name for path in found.adapters[0].folder.iterdir()} == {*new}
        assert {name.rpartition("/")[2] for name, _ in hub.loaded} == {*new}
        hub.loaded.clear()
        assert prepared(model, environ, adapters="sql=owner/sql@v2").adapters == found.adapters
        assert not hub.loaded
    finally:
        hub.close()


def test_one_in_s3_is_fetched_once(model, bucket, proxy, tmp_path):
    from tests.doubles.s3_rig import settings

    new = files_of(write_adapter(tmp_path / "new"))
    for name, content in {**new, "optimizer.pt": b"x"}.items():
        bucket.put_object(Bucket="models", Key=f"sql/{name}", Body=content)
    environ = settings(proxy, XDG_CACHE_HOME=str(tmp_path / "cache"))
    found = prepared(model, environ, adapters="sql=s3://models/sql/")
    assert files_of(found.adapters[0].folder) == new
    assert prepared(model, environ, adapters="sql=s3://models/sql/").adapters == found.adapters


def pickled(adapter: Path, name: str) -> Path:
    """The same adapter with tensors pickled by torch."""
    torch = pytest.importorskip("torch", reason="pickles are torch's")
    from safetensors.torch import load_file

    torch.save(load_file(adapter / adapters.WEIGHTS), adapter / name)
    (adapter / adapters.WEIGHTS).unlink()
    return adapter


def test_pickled_tensors_are_converted_once(model, tmp_path):
    name = adapters.PICKLES[0]
    from safetensors.numpy import load_file

    plain = load_file(write_adapter(tmp_path / "plain") / adapters.WEIGHTS)
    source = pickled(write_adapter(model / "adapters" / "sql"), name)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": os.environ["PATH"]}
    (found,) = prepared(model, environ).adapters
    written = load_file(found.folder / adapters.WEIGHTS)
    assert {one: values.tolist() for one, values in written.items()} == {
        one: values.tolist() for one, values in plain.items()
    }
    assert found.rank == 4
    when = (found.folder / adapters.WEIGHTS).stat().st_mtime_ns
    (again,) = prepared(model, environ).adapters
    assert again == found
    assert (again.folder / adapters.WEIGHTS).stat().st_mtime_ns == when
    (source / name).write_bytes((source / name).read_bytes()[:-7])
    with pytest.raises(ArtifactError, match="not a whole file"):
        prepared(model, environ)
    report = run(folder(tmp_path), **OPTIONS, adapters=f"sql={write_adapter(tmp_path / 'x')}")
    assert report.ok


def test_a_conversion_that_was_killed_leaves_nothing_that_looks_finished(tmp_path):
    source = pickled(write_adapter(tmp_path / "sql"), adapters.PICKLES[1])
    target = tmp_path / "cache" / "one"
    from djl_python_neuronx.artifacts import convert

    if (child := os.fork()) == 0:
        try:
            convert.sync_tree = lambda _: os._exit(9)
            convert.convert_adapter(source, target)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not target.exists()
    assert [*target.parent.iterdir()], "it was killed before it had begun"
    convert.convert_adapter(source, target)
    assert [path.name for path in target.parent.iterdir()] == ["one"]
    adapters.check(adapters.read(target, "sql"), FACTS, 4, ())
    convert.convert_adapter(source, target)


def test_a_single_one_is_obtained_for_a_running_model(tmp_path):
    options = ServingOptions(enable_lora=True, model_id="m", lora_target_modules=("q_proj",))
    place = str(write_adapter(tmp_path / "sql"))
    with pytest.raises(ArtifactError, match="it changes v_proj"):
        obtain("sql", place, options, FACTS, {}, origin="the request")
    options = options.model_copy(update={"lora_target_modules": ("q_proj", "v_proj")})
    assert obtain("sql", place, options, FACTS, {}, origin="the request").folder == tmp_path / "sql"
    for name in ("../sql", "", "m", "a/b", "sql\n", "."):
        with pytest.raises(ConfigError):
            obtain(name, place, options, FACTS, {}, origin="the request")
    assert json.loads((tmp_path / "sql" / adapters.CONFIG).read_text())["r"] == 4
