"""Models whose code lies outside NxD Inference: what is run, under which trust, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the nxdi backend needs transformers 4.57")

import torch
from safetensors.torch import save_file

from djl_python_neuronx.artifacts import fetch, model_code
from djl_python_neuronx.backends import LoadPlan, nxdi
from djl_python_neuronx.backends.nxdi import contrib as imported
from djl_python_neuronx.backends.nxdi.contrib import VARIABLE, fixes
from djl_python_neuronx.backends.nxdi.model import construct
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ServingError
from djl_python_neuronx.loading import compiled as graphs
from djl_python_neuronx.loading import output_weights
from djl_python_neuronx.loading.check import Report, check
from djl_python_neuronx.loading.compile_facts import compile_facts
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi import contrib, contrib_rules
from djl_python_neuronx.planning.nxdi.contrib import Code, Row
from tests.artifacts.folders import torchscript
from tests.backends.double_traffic import VOCAB_SIZE, assert_expected, folder_of
from tests.backends.nxdi_plans import compile_here, loaded, nxdi_plan
from tests.doubles import nxdi_double
from tests.doubles.hub import COMMITS, Hub
from tests.doubles.neuron_machine import TINY

MACHINE = named("trn1.32xlarge")
TOY = """
import os
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

os.environ["TOY_RAN"] = os.environ.get("TOY_RAN", "") + "x"


class ToyConfig(InferenceConfig):
    @classmethod
    def from_pretrained(cls, path, neuron_config):
        return cls(neuron_config, load_config=lambda self: vars(self).update(vocab_size=101, made="by itself"))


class NeuronToyForCausalLM(NeuronBaseForCausalLM):
    @classmethod
    def get_config_cls(cls):
        return ToyConfig
"""
SECOND = "\n\nclass NeuronOtherForCausalLM(NeuronToyForCausalLM):\n    pass\n"


def write(folder: Path, text: str = TOY, name: str = "modeling_toy.py", **others: str) -> Path:
    """A folder of code; its `__init__.py` cannot be imported, as some of the library's."""
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "src" / "__init__.py").write_text("import nowhere_at_all")
    (folder / "src" / name).write_text(text)
    for module, content in others.items():
        (folder / "src" / f"{module}.py").write_text(content)
    return folder


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.delenv("TOY_RAN", raising=False)
    monkeypatch.setitem(sys.modules, "neuronxcc", type(sys)("neuronxcc"))
    monkeypatch.setattr(sys.modules["neuronxcc"], "__version__", "2.31", raising=False)
    return nxdi_double.install(monkeypatch)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Row]]:
    """A function that adds a row for the code in a folder."""
    table: dict[str, Row] = {}
    monkeypatch.setattr(contrib, "rows", lambda: table)

    def add(folder: Path, **fields: Any) -> Row:
        digest = model_code.read(folder).digest
        whole = {"folder": "toy", "verdict": "right", "model_types": ("llama",), **fields}
        table[digest] = Row(sha256=digest, **whole)
        return table[digest]

    yield add
    for name in [name for name in sys.modules if name.startswith(imported.package_of(""))]:
        del sys.modules[name]


def plan_of(folder: Path, code: Path, class_name: str = "", **config: Any) -> LoadPlan:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text("")
    plan = nxdi_plan(folder_of(folder, "llama", **config))
    digest = model_code.read(code).digest
    return replace(plan, code=Code(code, digest, class_name), trust_remote_code=True)


def checked(target: Path, code: Path | str, **options: str) -> Report:
    settings = {
        "model_loader": "nxdi",
        "nxdi_model_code": str(code),
        "trust_remote_code": "true",
        "n_positions": "256",
        "tensor_parallel_degree": "1",
        **options,
    }
    return check(str(target), environ={}, overrides=settings, machine=MACHINE)


def test_the_class_of_the_folder_serves_and_no_other_code_of_it_runs(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = write(tmp_path / "code", TOY + SECOND)
    (code / "src" / "unused.py").write_text("import nowhere_at_all")
    known(code, class_name="NeuronOtherForCausalLM")
    with loaded(plan_of(tmp_path / "model", code)) as backend:
        assert_expected(backend, 0)
    assert type(made[-1]).__name__ == "NeuronOtherForCausalLM"
    assert os.environ["TOY_RAN"] == "x"
    assert VARIABLE not in os.environ
    assert "modeling_toy" not in sys.modules


def test_nothing_runs_without_trust_or_by_a_check(
    tmp_path: Path, made: list[Any], known: Callable[..., Row]
) -> None:
    code = write(tmp_path / "code")
    known(code)
    plan = plan_of(tmp_path / "model", code)
    with pytest.raises(ServingError, match="trust_remote_code=true alone"):
        construct(replace(plan, trust_remote_code=False))
    shutil.copytree(TINY, tmp_path / "tiny")
    for trust in ("true", "false"):
        report = checked(tmp_path / "tiny", code, trust_remote_code=trust)
        assert report.ok == (trust == "true"), report.findings.messages("error")
    assert "set that" in report.findings.messages("error")[0]
    # A folder's own file may name code, as it may set trust_remote_code: a start runs none without that.
    file = tmp_path / "tiny" / "serving.properties"
    lines = f"option.nxdi_model_code={code}\noption.model_loader=nxdi\noption.n_positions=256\n"
    file.write_text(lines)
    with pytest.raises(ServingError, match="trust_remote_code=true alone"):
        prepare_or_raise(None, tmp_path / "tiny", environ={}, machine=MACHINE)
    report = check(str(tmp_path / "tiny"), environ={}, overrides={}, machine=MACHINE)
    warned = [text for text in report.findings.messages("warning") if "author's code" in text]
    assert "nxdi_model_code" in warned[0]
    assert "TOY_RAN" not in os.environ


def test_what_is_hashed_is_what_runs(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = write(tmp_path / "code")
    known(code)
    plan = plan_of(tmp_path / "model", code)
    read = model_code.read

    def exchanged_afterwards(folder: Path) -> model_code.ModelCode:
        found = read(folder)
        write(folder, "raise RuntimeError('exchanged')")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(model_code, "read", exchanged_afterwards)
        assert type(construct(plan)).__name__ == "NeuronToyForCausalLM"
    imported._codes.clear()
    with pytest.raises(ArtifactError, match=f"was {plan.code and plan.code.digest}, and is "):
        construct(plan)


def test_the_digest_is_what_sha256sum_computes_and_links_lead_nowhere(tmp_path: Path) -> None:
    code = write(tmp_path / "code", modeling_b="b", a_first="é")
    write(tmp_path / "code", "x = 1", "nested.txt")
    (code / "src" / "inner").mkdir()
    (code / "src" / "inner" / "deep.py").write_text("")
    command = "find * -name '*.py' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    found = subprocess.run(
        command, shell=True, cwd=code / "src", capture_output=True, text=True, check=True
    )
    before = model_code.read(code).digest
    assert found.stdout.split()[0] == before
    (code / "src" / "nested.txt").write_text("other")
    assert model_code.read(code).digest == before
    outside = tmp_path / "outside.py"
    outside.write_text("secret = 1")
    (code / "src" / "link.py").symlink_to(outside)
    with pytest.raises(ArtifactAccessError, match="link out of the model's folder"):
        model_code.read(code)
    (code / "src" / "link.py").unlink()
    # The first could stand for the line of another file.
    for name in (b"a.py\n0123  b.py", b"a b.py", b"\xff.py"):
        path = Path(os.fsdecode(bytes(code / "src") + b"/" + name))
        path.write_text("")
        with pytest.raises(ArtifactError, match="expected names of letters"):
            model_code.read(code)
        path.unlink()
    (code / "src" / "modeling_toy.py").write_bytes(b"#" * model_code.MAX_BYTES)
    with pytest.raises(ArtifactError, match="more than 4 MiB"):
        model_code.read(code)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"expected modeling_\*.py"):
        model_code.read(tmp_path / "empty")


CLASSES = {
    "two": (TOY + SECOND, "", "NeuronToyForCausalLM or NeuronOtherForCausalLM; name its class"),
    "named": (TOY + SECOND, "NeuronOtherForCausalLM", "NeuronOtherForCausalLM"),
    "absent": (TOY, "NeuronNo", "no NeuronNo; name its class"),
    "none": ("x = 1", "", "no subclass of NeuronBaseForCausalLM"),
    "imported alone": (TOY.partition("class NeuronToy")[0], "", "no subclass"),
    "broken": ("import nowhere_at_all", "", "cannot be imported: ModuleNotFoundError"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_found_or_its_absence_is_an_error(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], name: str
) -> None:
    text, class_name, expected = CLASSES[name]
    plan = plan_of(tmp_path / "model", write(tmp_path / "code", text), class_name)
    if expected.startswith("Neuron") and "; " not in expected:
        assert type(construct(plan)).__name__ == expected
    else:
        with pytest.raises(ServingError, match=expected):
            construct(plan)


ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
"""As transformers 5 writes it."""
WITHOUT = TOY.replace("def get_config_cls", "def other")
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # code, row, config.json, and the class or the error
    "its own": (TOY, {}, {}, "ToyConfig"),
    "of the file": (WITHOUT, {}, {}, "ToyConfig"),
    "the library's": (
        WITHOUT.replace("class ToyConfig(InferenceConfig)", "class ToyConfig"),
        {},
        {},
        "InferenceConfig",
    ),
    "by itself": (TOY, {"made": "from_pretrained"}, {}, "ToyConfig"),
    "plain": (
        TOY,
        {"made": "plain_config"},
        # transformers 4 ties where nothing is set
        {"model_type": "unknown_to_transformers", "tie_word_embeddings": False, **ROTARY},
        "ToyConfig",
    ),
    "sizes": (
        TOY.replace("vocab_size=101", "vocab_size=7"),
        {"made": "from_pretrained"},
        {},
        "vocab_size=7, and config.json",
    ),
    "positions": (
        TOY.replace('made="by itself"', "rope_theta=1e4"),
        {"made": "from_pretrained"},
        {"model_type": "llama", **ROTARY},
        "rope_theta=10000.0, and config.json of .* 5.0",
    ),
    "values": (TOY, {"values": {"window": 3}, "unset": ("sliding_window",)}, {}, "ToyConfig"),
    "tied": (
        TOY,
        {"values": {"tie_word_embeddings": True}},
        {},
        "has no update_state_dict_for_tied",
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_made_as_the_row_says(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], name: str
) -> None:
    text, row, config, expected = CONFIGURATIONS[name]
    code = write(tmp_path / "code", text)
    known(code, **row)
    plan = plan_of(tmp_path / "model", code)
    if config:
        folder_of(tmp_path / "model", **config)
    if " " in expected:
        with pytest.raises(ServingError, match=expected):
            construct(plan)
        return
    found = construct(plan).config
    assert (type(found).__name__, found.vocab_size) == (expected, VOCAB_SIZE)
    assert getattr(found, "made", "") == (
        "by itself" if row.get("made") == "from_pretrained" else ""
    )
    if name == "plain":
        assert found.rope_theta == 5.0
    if name == "values":
        assert (found.window, found.sliding_window) == (3, None)


def test_weights_that_the_checkpoint_lacks_end_a_load_and_a_compile(
    tmp_path: Path, made: list[Any], known: Callable[..., Row]
) -> None:
    code = write(
        tmp_path / "code", f"{TOY}\n    parameters = ('embed_tokens.weight', 'norm.bias')\n"
    )
    known(code)
    plan = plan_of(tmp_path / "model", code)
    for presharded in (False, True):
        with (
            pytest.raises(ServingError, match=r"finds no weights for norm.bias \(1 in all\)"),
            loaded(replace(plan, presharded=presharded)),
        ):
            pass


def test_a_module_finds_itself_by_its_bare_name(
    tmp_path: Path, made: list[Any], known: Callable[..., Row]
) -> None:
    text = TOY.replace("return ToyConfig", "import modeling_toy; return modeling_toy.ToyConfig")
    text += "\nfrom .helper import VALUE\n"
    code = write(tmp_path / "code", text, helper="VALUE = 1")
    known(code)
    made_class = type(construct(plan_of(tmp_path / "model", code)))
    assert made_class.__module__.endswith(f"m{model_code.read(code).digest}.modeling_toy")


def test_another_process_that_gets_a_class_gets_the_same_code(
    tmp_path: Path, made: list[Any], known: Callable[..., Row]
) -> None:
    """As processes do that a library starts: the name has the digest, and the variable the folder."""
    code = write(tmp_path / "code", "VALUE = 5\n\n\ndef answer():\n    return VALUE\n")
    digest = model_code.read(code).digest
    name = f"{imported.package_of(digest)}.modeling_toy"
    program = f"import importlib; print(importlib.import_module({name!r}).answer())"
    environ = {**os.environ, VARIABLE: str(code), "PYTHONPATH": os.pathsep.join(sys.path)}
    for expected in ("5", "has changed"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert expected in done.stdout + done.stderr
        write(tmp_path / "code", "VALUE = 6\n")
    assert pickle.dumps(Code(code, digest))


DOUBTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    # row (without one: unknown), what differs in config.json, options, and the error
    "unknown": ({}, {}, {}, "was never compared with transformers"),
    "wrong": ({"verdict": "wrong", "reason": "forgets"}, {}, {}, "gives wrong answers: it forgets"),
    "fails": ({"verdict": "fails", "reason": "stops"}, {}, {}, "does not run: it stops"),
    "type": ({"model_types": ("granite",)}, {}, {}, "for model_type granite, and not for llama"),
    "degree": ({"degrees": (2,)}, {}, {}, "was compared on 2 cores alone; set 2"),
    "length": ({"longest": 128}, {}, {}, "is right up to 128 tokens; set 128 at most"),
    "field": ({"longest": "window"}, {"window": 64}, {}, "up to 64 tokens"),
    "window": ({"degrees": (1,)}, {"sliding_window": 32}, {}, "up to 32 tokens"),
    "slots": ({"slots": 1}, {}, {"max_rolling_batch_size": "2"}, "with 1 slots at most"),
    "static": (
        {"degrees": (1,)},
        {},
        {"rolling_batch_strategy": "naive_rolling_batch", "max_rolling_batch_size": "2"},
        "in continuous batches alone",
    ),
    "override": (
        {"degrees": (1,)},
        {},
        {"override_neuron_config": '{"attn_cls": "x"}'},
        "compared without it",
    ),
    "rope": (
        {"degrees": (1,)},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {},
        "with rope_scaling=",
    ),
    "quantised": (
        {"degrees": (1,)},
        {"quantization_config": {"bits": 4}},
        {},
        "quantization_config=",
    ),
    "only": ({"only": {"hidden_act": ("gelu",)}}, {}, {}, "with hidden_act=silu of config.json"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_was_not_shown_is_refused_unless_the_operator_accepts_it(
    tmp_path: Path, known: Callable[..., Row], name: str
) -> None:
    row, config, options, expected = DOUBTS[name]
    code = write(tmp_path / "code")
    if row:
        known(code, **row)
    shutil.copytree(TINY, tmp_path / "tiny")
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    report = checked(tmp_path / "tiny", code, **options)
    (error,) = report.findings.messages("error")
    assert expected in error
    assert "nxdi_model_code_unverified=true" in error
    assert model_code.read(code).digest in error
    report = checked(tmp_path / "tiny", code, nxdi_model_code_unverified="true", **options)
    assert report.ok, report.findings.messages("error")
    assert any(expected.partition(";")[0] in text for text in report.findings.messages("warning"))


def test_a_release_that_was_not_run_is_refused(tmp_path: Path, known: Callable[..., Row]) -> None:
    code = write(tmp_path / "code")
    known(code)
    prepared = checked(TINY, code).prepared
    assert prepared is not None
    for version, refused in {"0.7.14366": True, "0.9.1": False, "0.10.18399+e": False}.items():
        case = replace(prepared.case, library_version=version)
        errors = [one.problem for one in contrib_rules.findings(case) if one.level == "error"]
        assert any(f"0.9 or 0.10, and {version} is installed" in text for text in errors) == refused


def test_options_that_the_run_did_not_have_are_left_out_or_refused(
    tmp_path: Path, known: Callable[..., Row]
) -> None:
    code = write(tmp_path / "code")
    known(code)
    report = checked(TINY, code, fuse_qkv="true", attn_kernel_enabled="true", vocab_parallel="true")
    assert report.ok, report.findings.messages("error")
    assert report.prepared is not None
    arguments = report.prepared.planned.arguments
    assert arguments is not None
    assert (
        not {"fused_qkv", "attn_kernel_enabled", "vocab_parallel"} & arguments.neuron_config.keys()
    )
    assert any(
        "fuse_qkv" in text and "left out" in text for text in report.findings.messages("note")
    )
    # As with the library's own classes: 2 does not divide the vocabulary.
    config = {**json.loads((TINY / "config.json").read_text()), "vocab_size": 401}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (error,) = checked(tmp_path, code, tensor_parallel_degree="2").findings.messages("error")
    assert "never gives the last tokens" in error
    (error,) = checked(TINY, code, attention_dtype="float32").findings.messages("error")
    assert "attention_dtype" in error


def test_check_names_the_code_and_auto_takes_the_library_for_any_model_type(
    tmp_path: Path, known: Callable[..., Row]
) -> None:
    code = write(tmp_path / "code")
    known(code, model_types=("granite",))
    config = {**json.loads((TINY / "config.json").read_text()), "model_type": "granite"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    report = checked(tmp_path / "model", code, model_loader="auto")
    assert report.ok, report.findings.messages("error")
    assert report.prepared is not None
    assert report.prepared.backend == "nxdi"
    assert report.prepared.planned.memory is not None
    text = "\n".join(report.findings.messages("note"))
    assert f"{code} (SHA-256 {model_code.read(code).digest})" in text
    assert "toy of NxD Inference's contrib/models" in text
    assert checked(tmp_path / "model", code, nxdi_model_class="NeuronToyForCausalLM").ok
    (error,) = checked(tmp_path / "model", code, nxdi_model_class="NeuronToy").findings.messages(
        "error"
    )
    assert f"the code in {code} has no class NeuronToy;" in error
    assert "the parameter count is estimated" in text
    # A length that nobody sets is one that is right.
    known(code, model_types=("granite",), longest="hidden_size")
    shorter = check(
        str(tmp_path / "model"),
        environ={},
        overrides={"nxdi_model_code": str(code), "trust_remote_code": "true"},
        machine=MACHINE,
    )
    assert shorter.ok, shorter.findings.messages("error")
    assert shorter.prepared is not None
    assert shorter.prepared.options.max_model_len == config["hidden_size"]
    (error,) = checked(TINY, code, model_loader="tnx").findings.messages("error")
    assert "transformers-neuronx has no equivalent" in error
    assert checked(TINY, code, model_loader="cpu").ok
    for name in ("nowhere", "./nowhere", "/no/such/place"):
        (error,) = checked(TINY, name).findings.messages("error")
        assert f"there is no folder '{name}'" in error


def facts_of(code: Path, cache: Path) -> dict[str, Any]:
    prepared = prepare_or_raise(
        None,
        TINY,
        environ={"NEURON_COMPILE_CACHE_URL": str(cache)},
        overrides={
            "model_loader": "nxdi",
            "n_positions": "256",
            "tensor_parallel_degree": "1",
            "nxdi_model_code": str(code),
            "trust_remote_code": "true",
        },
        machine=MACHINE,
    )
    return compile_facts(prepared, TINY).graph_options


def test_the_compile_key_has_the_code_and_how_it_is_loaded_and_no_place(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixes, "FIXES", {"mend": lambda module: None})
    code = write(tmp_path / "code")
    moved = Path(shutil.copytree(code, tmp_path / "moved"))
    known(code)
    first = facts_of(code, tmp_path)
    assert first == facts_of(moved, tmp_path)
    assert first["nxdi_code_sha256"] == model_code.read(code).digest
    assert str(tmp_path) not in json.dumps(first)
    others = []
    for row in ({"values": {"a": 1}}, {"unset": ("a",)}, {"fix": "mend"}):
        known(code, **row)
        others.append(facts_of(code, tmp_path))
    write(code, TOY + "\n")
    known(code)
    others.append(facts_of(code, tmp_path))
    assert len({json.dumps(each) for each in (first, *others)}) == 5


def test_an_output_has_the_code_and_is_served_with_it_alone(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_archive(backend: str, plan: LoadPlan, target: Path, **more: object) -> None:
        compile_here(backend, plan, target, **more)
        torchscript(target / nxdi_double.GRAPHS)
        for path in (target / "weights").glob("*.safetensors"):
            save_file({"w": torch.ones(1)}, path)

    for module in (graphs, output_weights):
        monkeypatch.setattr(module, "compile_guarded", compile_archive)
    tied = "    update_state_dict_for_tied_weights = NeuronLlamaForCausalLM.update_state_dict_for_tied_weights\n"
    code = write(tmp_path / "code", TOY + tied, inner="x = 1")
    known(code)
    output, environ = tmp_path / "out", {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}
    options = {"model_loader": "nxdi", "n_positions": "128,256", "tensor_parallel_degree": "1"}
    named_code = {"nxdi_model_code": str(code), "trust_remote_code": "true"}
    compile_model(
        str(TINY),
        str(output),
        environ=environ,
        overrides={**options, **named_code},
        machine=MACHINE,
    )
    assert "TOY_RAN" in os.environ
    assert model_code.read(output / "model_code").digest == model_code.read(code).digest
    shutil.rmtree(code)

    def prepared(target: Path, **more: str) -> Any:
        return prepare_or_raise(None, target, environ=environ, overrides=more, machine=MACHINE)

    own = prepared(output)
    assert (own.case.code.folder, own.own_graphs) == (output / "model_code", output / "compiled")
    # By its name it has no leave to run code.
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ServingError, match="trust_remote_code=true alone"):
        prepared(other, model_id=str(output))
    by_name = prepared(other, model_id=str(output), trust_remote_code="true")
    assert by_name.case.code.folder == output / "model_code"
    # Of graphs that another program compiled it is unknown which code they are of.
    foreign = Path(shutil.copytree(output, tmp_path / "foreign"))
    (foreign / "manifest.json").unlink()
    (foreign / "compiled" / "manifest.json").unlink()
    with pytest.raises(ServingError, match="may be other code than that of the compiled graphs"):
        prepared(foreign)
    write(output / "model_code", TOY + "\n")
    with pytest.raises(ServingError, match=r"modeling_toy\.py"):
        prepared(output)
    shutil.rmtree(output / "model_code")
    with pytest.raises(ServingError, match="model_code"):
        prepared(output)


def test_code_of_the_hub_is_fetched_at_its_revision_with_trust_alone(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    code = write(tmp_path / "code")
    known(code)
    hub = Hub()
    try:
        files = {f"src/{path.name}": path.read_bytes() for path in (code / "src").iterdir()}
        hub.models["ours/code"] = {**files, "setup.py": b"x", "model.safetensors": b"y"}
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        options = {
            "model_loader": "nxdi",
            "n_positions": "256",
            "tensor_parallel_degree": "1",
            "nxdi_model_code": "ours/code@v2",
        }
        with pytest.raises(ServingError, match="trust_remote_code=true alone"):
            prepare_or_raise(None, TINY, environ=environ, overrides=options, machine=MACHINE)
        options["trust_remote_code"] = "true"
        report = check(str(TINY), environ=environ, overrides=options, machine=MACHINE)
        assert report.ok
        assert any(
            "not judged: a start fetches" in one for one in report.findings.messages("warning")
        )
        assert hub.loaded == []
        prepared = prepare_or_raise(None, TINY, environ=environ, overrides=options, machine=MACHINE)
        assert prepared.case.code is not None
        assert prepared.case.code.folder.name == COMMITS["v2"]
        assert prepared.case.code.digest == model_code.read(code).digest
        assert {name for name, _ in hub.loaded} == files.keys()
    finally:
        hub.close()


def test_a_place_in_s3_has_no_revision(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = write(tmp_path / "code")
    known(code)
    fetched: set[tuple[str, str | None]] = set()

    def fetch_here(place: str, *, revision: str | None = None, **how: Any) -> Path:
        fetched.add((place, revision))
        return code

    monkeypatch.setattr(fetch, "fetch", fetch_here)
    place = "s3://bucket/models/granite@v2"
    options = {"model_loader": "nxdi", "n_positions": "256", "tensor_parallel_degree": "1"}
    code_options = {"nxdi_model_code": place, "trust_remote_code": "true"}
    prepare_or_raise(None, TINY, environ={}, overrides={**options, **code_options}, machine=MACHINE)
    assert fetched == {(place, None)}


def test_a_fix_changes_the_module_of_its_row_alone(
    tmp_path: Path, made: list[Any], known: Callable[..., Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mend(module: Any) -> None:
        module.NeuronToyForCausalLM.mended = True

    monkeypatch.setattr(imported, "FIXES", {"mend": mend})
    for number, row in enumerate(({}, {"fix": "mend"})):
        code = write(tmp_path / f"code{number}", TOY + "\n" * number)
        known(code, **row)
        found = construct(plan_of(tmp_path / "model", code))
        assert getattr(found, "mended", False) == bool(row)


def test_every_row_names_a_fix_that_exists_and_a_reason_if_it_is_refused() -> None:
    assert contrib.rows()
    for row in contrib.rows().values():
        assert not row.fix or row.fix in fixes.FIXES
        assert bool(row.reason) == (row.verdict != "right"), row.folder
        assert row.model_types
    assert {row.fix for row in contrib.rows().values()} - {""} == fixes.FIXES.keys()


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {
    "rope_type": "yarn",
    "factor": 20.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "original_max_position_embeddings": 4096,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    # what the published config.json of each folder has of positions
    "Phi-3-mini-4k-instruct": {
        "model_type": "phi3",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
    },
    "AFM-4.5B-Base": {
        "model_type": "arcee",
        "hidden_act": "relu2",
        "max_position_embeddings": 65536,
        "rope_scaling": YARN,
    },
    "MiniCPM4-8B": {
        "model_type": "minicpm",
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "rope_type": "longrope",
            **LONGROPE,
            "original_max_position_embeddings": 32768,
        },
    },
    "Phi-3.5-mini-instruct": {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **LONGROPE},
    },
    "hunyuan-7b-instruct": {
        "model_type": "hunyuan_v1_dense",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
OTHERS: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    # folder; what differs in config.json, and in its rope_scaling; the only error
    ("Phi-3-mini-4k-instruct", {"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor=0.5"),
    (
        "Phi-3-mini-4k-instruct",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {},
        "partial_rotary_factor=0.5",
    ),
    ("AFM-4.5B-Base", {}, {"attention_factor": 1.7}, "attention_factor=1.7"),
    ("AFM-4.5B-Base", {}, {"mscale": 0.7}, "mscale=0.7"),
    ("AFM-4.5B-Base", {}, {"mscale_all_dim": 1.0}, "mscale_all_dim=1.0"),
    ("AFM-4.5B-Base", {}, {"truncate": False}, "truncate=False"),
    (
        "AFM-4.5B-Base",
        {},
        {"original_max_position_embeddings": None},
        "without original_max_position_embeddings",
    ),
    ("MiniCPM4-8B", {}, {"original_max_position_embeddings": 128}, "right up to 128 tokens"),
    ("Phi-3.5-mini-instruct", {}, {"attention_factor": 1.7}, "attention_factor=1.7"),
    ("Phi-3.5-mini-instruct", {"partial_rotary_factor": 0.75}, {}, "partial_rotary_factor=0.75"),
    (
        "Phi-3.5-mini-instruct",
        {"original_max_position_embeddings": None},
        {},
        "without original_max_position_embeddings",
    ),
    ("hunyuan-7b-instruct", {"max_position_embeddings": 128}, {}, "right up to 128 tokens"),
)


def test_a_row_takes_positions_as_published_and_no_others(tmp_path: Path) -> None:
    """Numbers that the code does not read change the answers of transformers alone."""
    prepared = checked(TINY, write(tmp_path / "code"), nxdi_model_code_unverified="true").prepared
    assert prepared is not None
    strict = prepared.options.model_copy(update={"nxdi_model_code_unverified": False})
    base = replace(prepared.case, options=strict)
    known = {row.folder: row for row in contrib.rows().values()}

    def errors(folder: str, config: dict[str, Any]) -> list[str]:
        code = Code(tmp_path / "code", known[folder].sha256)
        case = replace(base, code=code, model=ModelFacts.from_config(config))
        return [one.problem for one in contrib_rules.findings(case) if one.level == "error"]

    tiny = json.loads((TINY / "config.json").read_text())
    unlike = [
        (folder, found)
        for folder, given in PUBLISHED.items()
        if (found := errors(folder, {**tiny, **given}))
    ]
    for folder, config, scaled, expected in OTHERS:
        given = {**tiny, **PUBLISHED[folder], **config}
        if scaled:
            given["rope_scaling"] = {**given["rope_scaling"], **scaled}
        found = errors(folder, given)
        if len(found) != 1 or expected not in found[0]:
            unlike.append((f"{folder} {expected}", found))
    assert unlike == []


def test_nxdi_compile_runs_the_code(
    tmp_path: Path, made: list[Any], known: Callable[..., Row]
) -> None:
    code = write(tmp_path / "code")
    known(code)
    (tmp_path / "target").mkdir()
    nxdi.compile(plan_of(tmp_path / "model", code), tmp_path / "target")
    assert (tmp_path / "target" / nxdi_double.GRAPHS).is_file()
    assert os.environ["TOY_RAN"] == "x"


@pytest.mark.nxdi
def test_the_library_itself_gets_no_model_without_weights(
    tmp_path: Path, known: Callable[..., Row]
) -> None:
    """The configuration that this class reads ties no embeddings, and the library leaves lm_head random."""
    code = Path(os.environ["NXDI_SRC"]) / "contrib/models/xglm-564M"
    known(code, made="from_pretrained", model_types=("xglm",))
    sizes = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 96}
    (tmp_path / "model").mkdir()
    transformers = pytest.importorskip("transformers")
    config = transformers.XGLMConfig(**sizes, max_position_embeddings=64)
    transformers.XGLMForCausalLM(config).save_pretrained(tmp_path / "model")
    plan = nxdi_plan(tmp_path / "model")
    digest = model_code.read(code).digest
    plan = replace(plan, code=Code(code, digest), trust_remote_code=True)
    with pytest.raises(ServingError, match=r"finds no weights for lm_head\.weight \(1 in all\)"):
        nxdi.load(plan)
