"""The recipes of configs/: each is ready for each model that it is for, and its comment explains what is not even."""

import json
import os
import re
from pathlib import Path

import huggingface_hub.constants  # noqa: F401  (reads HF_HUB_OFFLINE once, which the tests set)
import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.loading import check as check_module
from djl_python_neuronx.planning.machines import GIB, INSTANCES
from djl_python_neuronx.planning.nxdi import contrib
from tests.loading.checking import LAPTOP, folder, run
from tools.recipes import CHECKPOINTS, Recipe, configuration, offline, recipes

EXPLAINED = {
    # words of a warning, to those that the recipe's comment has for it
    "users of neuronx-cc": "Users report",
    "gelu's tanh form": "tanh form of gelu",
    "not judged: a start fetches the code": "by contributed code",
    "a start may run its author's code": "trust_remote_code",
}
REFUSED = {
    # models of the page's last table, by model_type, to words of the reason
    "flux": "has no class",
    "gemma3": "gives wrong answers",
    "llama4": "takes images",
    "mllama": "takes images",
    "pixtral": "takes images",
    "qwen2_vl": "takes images",
    "qwen3_vl": "takes images",
    "whisper": "has no class",
}


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    return offline(tmp_path_factory.mktemp("hf") / "hub")


@pytest.fixture
def checked(environ, monkeypatch, capsys):
    """`djl-neuronx check ... --json` with the stored configurations, on a machine without Neuron."""
    for name in [name for name in os.environ if name.startswith(("NEURON_", "OPTION_", "HF_"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(check_module.machines, "detect", lambda **kwargs: LAPTOP)

    def check(*arguments):
        status = cli.main(["check", *arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return check


def elsewhere(recipe):
    """The arguments that place its code outside its library here."""
    return [f"-o{name}={value}" for name, value in recipe.placed().items()]


def divided(model_id):
    """Heads, and heads of keys and values, by the names that each architecture has for them in config.json."""
    config = json.loads(configuration(model_id))
    heads, *_ = (
        config[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in config
    )
    groups = config.get("num_key_value_heads") or config.get("attn_config", {}).get("kv_n_heads")
    return heads, 1 if config.get("multi_query") else groups or heads


def problems(recipe, model_id, status, found):
    """Faults of a recipe that was checked for one of its models."""
    if status or found["errors"]:
        yield f"refused: {found['errors']}"
        return
    for warning in found["warnings"]:
        words = [said for cause, said in EXPLAINED.items() if cause in warning]
        if not any(said in recipe.comment for said in words):
            yield f"a warning that the comment does not explain: {warning}"
    plan, memory = found["plan"], found["plan"]["memory_per_core"]
    timeout = found["options"]["model_loading_timeout"]["value"]
    if plan["estimated_compile_s"] > timeout:
        yield f"compiles for {plan['estimated_compile_s']} s, longer than {timeout}"
    if found["options"]["model_id"]["value"] != model_id or not memory["fits"]:
        yield f"{found['options']['model_id']}, {memory}"
    if recipe.instance is None:
        return
    machine, degree = (
        INSTANCES[recipe.instance],
        found["options"]["tensor_parallel_degree"]["value"],
    )
    if memory["needed_bytes"] > 0.95 * memory["capacity_bytes"] or not memory["capacity_bytes"]:
        yield f"less than a twentieth of a core is free: {memory}"
    if plan["host_bytes"] > machine.host_memory_gib * GIB:
        yield f"a load takes {plan['host_bytes'] / GIB} of {machine.host_memory_gib} GiB"
    if plan["device"]["instance_type"] != recipe.instance or not plan["graphs"]:
        yield f"planned for {plan['device']}"
    heads, groups = divided(model_id)
    if heads % degree and "padded" not in recipe.comment:
        yield f"{degree} does not divide {heads} heads"
    if groups % degree and heads != groups and "copied" not in recipe.comment:
        yield f"{degree} does not divide {groups} KV heads"


def test_every_recipe_is_ready_for_each_of_its_models(checked):
    wrong = []
    for recipe in recipes():
        named = ("--instance", recipe.instance) if recipe.instance else ()
        for model_id in (recipe.model_id, *recipe.others):
            other = () if model_id == recipe.model_id else (f"-omodel_id={model_id}",)
            status, found = checked(str(recipe.path), *named, *other, *elsewhere(recipe))
            wrong += [
                f"{recipe.path.stem} with {model_id}: {problem}"
                for problem in problems(recipe, model_id, status, found)
            ]
    assert wrong == []


def test_every_recipe_is_planned_where_no_machine_is_named(checked):
    for recipe in recipes():
        status, found = checked(str(recipe.path), *elsewhere(recipe))
        assert (status, found["errors"]) == (0, []), recipe.path.stem
        assert (found["plan"]["loader"] == "cpu") == (recipe.instance is None), recipe.path.stem


def test_every_recipe_is_what_its_name_and_comment_say():
    found = recipes()
    assert len(found) > 25
    for recipe in found:
        family = (recipe.instance or "cpu.").partition(".")[0]
        assert f"-{family}" in recipe.path.stem or recipe.path.stem.startswith(family), recipe
        assert len(recipe.comment) > 60, recipe
        assert "Also for" not in recipe.comment or recipe.others, recipe
    named = [model_id for recipe in found for model_id in (recipe.model_id, *recipe.others)]
    assert set(named) - {"../examples/tiny-llama"} <= CHECKPOINTS.keys()


def test_code_outside_the_library_is_right_for_its_recipe():
    rows = {row.folder: row for row in contrib.rows().values()}
    contributed = [recipe for recipe in recipes() if recipe.code]
    assert contributed
    for recipe in contributed:
        row = rows[Path(recipe.code).name]
        degree = re.findall(r"^option.tensor_parallel_degree=(\d+)$", recipe.path.read_text(), re.M)
        assert (row.verdict, degree) == ("right", ["2"]), recipe
        assert 2 in row.degrees, recipe
        assert json.loads(configuration(recipe.model_id))["model_type"] in row.model_types, recipe


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("option.n_positions=8192", "option.n_positions=65536", "refused"),
        ("option.max_rolling_batch_size=4", "option.max_rolling_batch_size=16", "a twentieth"),
        ("option.tensor_parallel_degree=2", "option.tensor_parallel_degree=1", "refused"),
        ("option.model_loading_timeout=3600", "option.model_loading_timeout=600", "longer than"),
        ("option.dtype=bf16", "option.dtype=bf16\noption.fancy=1", "refused"),
        ("Users report", "Nobody reports", "does not explain"),
    ],
)
def test_a_recipe_that_is_wrong_is_found(checked, tmp_path, old, new, words):
    (right,) = [recipe for recipe in recipes() if recipe.path.stem == "mistral-7b-inf2"]
    path = tmp_path / "serving.properties"
    text = right.path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    wrong = Recipe.read(path)
    found = checked(str(path), "--instance", wrong.instance)
    assert words in " ".join(problems(wrong, wrong.model_id, *found))


def test_models_without_a_recipe_are_refused(tmp_path):
    config = json.loads(configuration("meta-llama/Meta-Llama-3-8B"))
    for kind, reason in REFUSED.items():
        target = folder(tmp_path, config={**config, "model_type": kind})
        report = run(target, machine="trn1.32xlarge", tensor_parallel_degree="32")
        assert any(reason in error for error in report.findings.messages("error")), kind
