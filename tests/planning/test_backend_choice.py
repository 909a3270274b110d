"""Which backend loads, over every mix of machine, libraries and wishes; and how a placeholder is recognised."""

import itertools
import re
import sys

import pytest

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import BackendUnavailableError
from djl_python_neuronx.planning.backend_choice import (
    Choice,
    Library,
    choose_backend,
    libraries,
)
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import judge

NEURON_LOADERS = {name: facts.package for name, facts in NEURON_BACKENDS.items()}
CPU = DeviceInfo(None, 0, 0, 2**33, 2, "0 devices under /dev, no neuron-ls")
INF2 = DeviceInfo("inf2.xlarge", 1, 2, 2**35, 4, "1 devices under /dev, no neuron-ls")


def installed(**states):
    """The four packages; `tnx="placeholder"` and the like, by loader, `base` for what both stand on."""
    names = {**NEURON_LOADERS, "base": "torch-neuronx", "compiler": "neuronx-cc"}
    return {
        package: Library(package, "1", states.get(short, "missing"))
        for short, package in names.items()
    }


BOTH = {"nxdi": "installed", "tnx": "installed"}


def explain(
    device, packages, model_type=None, artifact=None, *, dry_run=False, vocab=32000, **options
):
    given, facts = ServingOptions(**options), ModelFacts(model_type=model_type, vocab_size=vocab)
    return choose_backend(
        given,
        device,
        model_type,
        lambda backend: judge(Case(given, facts, device, NEURON_BACKENDS[backend]), options),
        installed=packages,
        artifact_backend=artifact,
        dry_run=dry_run,
    )


def choose(*args, **options):
    return explain(*args, **options).backend


STATES = ("missing", "installed", "placeholder")


@pytest.mark.parametrize(("nxdi", "tnx"), list(itertools.product(STATES, STATES)))
def test_auto_on_a_neuron_machine_is_never_the_cpu(nxdi, tnx):
    packages = installed(nxdi=nxdi, tnx=tnx)
    if nxdi == "installed":
        assert choose(INF2, packages) == "nxdi"
    elif tnx == "installed":
        assert choose(INF2, packages) == "tnx"
    else:
        with pytest.raises(BackendUnavailableError) as caught:
            choose(INF2, packages)
        for word in ("https://awsdocs-neuron.readthedocs-hosted.com/", "public.ecr.aws/neuron/"):
            assert word in str(caught.value)
        assert ("PyPI's placeholder" in str(caught.value)) == ("placeholder" in {nxdi, tnx})


UNKNOWN = "does not support model_type"
REASONS = [
    # model type, installed, options, backend, why
    ("llama", BOTH, {}, "nxdi", "it is preferred to tnx"),
    (None, BOTH, {}, "nxdi", "it is preferred to tnx"),
    ("qwen3", BOTH, {}, "nxdi", f"tnx {UNKNOWN} 'qwen3'"),
    ("gpt2", BOTH, {}, "tnx", f"nxdi {UNKNOWN} 'gpt2'"),
    # the only one that supports it, whatever it refuses
    ("gpt2", BOTH, {"output_logits": True}, "tnx", f"nxdi {UNKNOWN} 'gpt2'"),
    ("llama", {"tnx": "installed"}, {}, "tnx", "neuronx-distributed-inference is not installed"),
    ("llama", {"nxdi": "installed"}, {}, "nxdi", "transformers-neuronx is not installed"),
    (
        "llama",
        {"nxdi": "placeholder", "tnx": "installed"},
        {},
        "tnx",
        "the installed neuronx-distributed-inference is PyPI's placeholder, not the library",
    ),
    # options that only transformers-neuronx has, and that change more than speed
    (
        "llama",
        BOTH,
        {"enable_mixed_precision_accumulation": True},
        "tnx",
        "nxdi lacks enable_mixed_precision_accumulation",
    ),
    ("llama", BOTH, {"load_split_model": True}, "tnx", "nxdi refuses load_split_model"),
    (
        "llama",
        BOTH,
        {"enable_chunked_prefill": True, "cache_layout": "BSH"},
        "tnx",
        "nxdi refuses enable_chunked_prefill",
    ),
    # ... speed alone
    (
        "llama",
        BOTH,
        {"neuron_optimize_level": 3, "cache_layout": "BSH"},
        "nxdi",
        "it is preferred to tnx",
    ),
    # ... and what only NxD Inference has, for a model of both
    (
        "mistral",
        BOTH,
        {"output_logits": True, "on_device_generation": True},
        "nxdi",
        "tnx refuses output_logits",
    ),
    # ... and what this version serves with transformers-neuronx alone
    (
        "llama",
        BOTH,
        {"kv_cache_quantize": "int8", "allow_known_defects": True},
        "tnx",
        "nxdi refuses kv",
    ),
    (
        "llama",
        BOTH,
        {"speculative_draft_model": "d"},
        "tnx",
        "nxdi lacks speculative_draft_model",
    ),
    (
        "llama",
        BOTH,
        {"ngram_prompt_lookup_max": 3},
        "nxdi",
        "it is preferred to tnx",
    ),
    ("mixtral", BOTH, {"quantize": "static_int8"}, "nxdi", "it is preferred to tnx"),
    # what both refuse something of: the one that the file is for, whose errors are then those of the file
    (
        "llama",
        BOTH,
        {"speculative_draft_model": "d", "shard_over_sequence": True},
        "tnx",
        "nxdi lacks speculative_draft_model",
    ),
    (
        "mistral",
        BOTH,
        {"speculative_draft_model": "d"},
        "nxdi",
        "tnx refuses speculative_draft_model",
    ),
    # ... or each of something that it lacks: the first
    (
        "llama",
        BOTH,
        {"load_split_model": True, "output_logits": True},
        "nxdi",
        "it is preferred to tnx",
    ),
    # a refusal counts less than what is not there
    (
        "llama",
        {"nxdi": "installed"},
        {"load_split_model": True},
        "nxdi",
        "transformers-neuronx is not installed",
    ),
    # rules about values that are not filled in yet refuse nothing
    ("llama", BOTH, {"token_generation_batches": (1, 2)}, "nxdi", "it is preferred to tnx"),
]


@pytest.mark.parametrize(("model_type", "packages", "options", "backend", "why"), REASONS)
def test_which_library_and_why_not_the_other(model_type, packages, options, backend, why):
    choice = explain(INF2, installed(**packages), model_type, **options)
    assert choice.backend == backend
    assert choice.reason.startswith(f"model_loader=auto takes {backend}: {why}")
    assert explain(INF2, installed(**packages), model_type, dry_run=True, **options) == choice


def test_what_only_the_model_shows_decides():
    choice = explain(INF2, installed(**BOTH), "llama", vocab=32001, tensor_parallel_degree=2)
    assert choice.backend == "tnx"
    said = "model_loader=auto takes tnx: nxdi refuses tensor_parallel_degree (NxD Inference never"
    assert choice.reason.startswith(said)


def test_a_model_of_no_library():
    with pytest.raises(
        BackendUnavailableError,
        match=r"nxdi does not support model_type 't5'; tnx does not support model_type 't5'",
    ):
        choose(INF2, installed(**BOTH), model_type="t5")


@pytest.mark.parametrize("old", ["optimum", "vllm"])
def test_loaders_of_the_old_engine_leave_the_choice_open(old):
    both = installed(**BOTH)
    assert choose(CPU, both, model_loader=old) == "cpu"
    assert choose(INF2, both, model_loader=old) == "nxdi"
    assert choose(INF2, both, artifact="tnx", model_loader=old) == "tnx"


def test_a_placeholder_under_the_real_library_is_named():
    with pytest.raises(BackendUnavailableError, match="torch-neuronx is PyPI's placeholder"):
        choose(INF2, installed(tnx="installed", base="placeholder"))


@pytest.mark.parametrize("tnx", STATES)
def test_auto_without_a_device_is_the_cpu(tnx):
    choice = explain(CPU, installed(tnx=tnx))
    assert choice.backend == "cpu"
    assert choice.reason == f"model_loader=auto takes cpu: there is no Neuron device ({CPU.seen})"


@pytest.mark.parametrize("device", [CPU, INF2])
@pytest.mark.parametrize("loader", ["cpu", "tnx", "nxdi"])
def test_a_loader_that_is_set_is_taken_and_needs_no_reason(device, loader):
    assert explain(device, installed(**BOTH), model_loader=loader) == Choice(loader)


FIXES = [
    # installed, model type, loader, the other one that the error may advise
    ({}, "llama", "tnx", None),
    ({}, "llama", "nxdi", None),
    ({"tnx": "installed"}, "llama", "nxdi", "tnx"),
    ({"tnx": "installed"}, "qwen3", "nxdi", None),
    ({"nxdi": "installed"}, "llama", "tnx", "nxdi"),
    ({"nxdi": "installed"}, "gpt2", "tnx", None),
    ({"tnx": "installed", "nxdi": "placeholder"}, "llama", "nxdi", "tnx"),
]


@pytest.mark.parametrize(("packages", "model_type", "loader", "other"), FIXES)
def test_a_loader_without_its_library_is_never_replaced(packages, model_type, loader, other):
    with pytest.raises(BackendUnavailableError) as caught:
        choose(INF2, installed(**packages), model_type, model_loader=loader)
    message = str(caught.value)
    assert f"backend '{loader}' (option.model_loader) cannot be used" in message
    assert "https://awsdocs-neuron.readthedocs-hosted.com/" in message
    assert re.findall(r"set option\.model_loader=(\w+)", message) == ([other] if other else [])


def test_auto_takes_what_the_artifact_was_compiled_for():
    choice = explain(INF2, installed(**BOTH), artifact="tnx")
    assert choice.backend == "tnx"
    assert choice.reason == "model_loader=auto takes tnx: the model's files are for it alone"
    with pytest.raises(BackendUnavailableError, match="the model's format") as caught:
        choose(INF2, installed(tnx="installed"), artifact="nxdi")
    assert "option.model_loader=" not in str(caught.value)  # no other can load it


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An importable folder; call it to install a package with a description."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, version, description):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(f"{head}\n{description}\n")

    return install


def test_a_checkout_states_its_version(monkeypatch, tmp_path):
    name, module = "neuronx-distributed-inference", "neuronx_distributed_inference"
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert libraries()[name] == Library(name, None, "installed")
    (tmp_path / module / "_version.py").write_text('# as its own\n__version__ = "0.6.0"\n')
    assert libraries()[name] == Library(name, "0.6.0", "installed")
    assert module not in sys.modules


def test_a_placeholder_of_pypi_is_told_from_the_library(site):
    site("transformers-neuronx", "0.1", "WRONG PACKAGE. Please install the package from …")
    site("neuronx-distributed-inference", "0.9.0", "Inference on Trainium and Inferentia")
    found = libraries()
    assert found["transformers-neuronx"] == Library("transformers-neuronx", "0.1", "placeholder")
    assert found["neuronx-distributed-inference"].state == "installed"


def test_a_checkout_on_the_path_is_installed_and_not_imported(site, tmp_path):
    module = tmp_path / "transformers_neuronx"
    module.mkdir()
    (module / "__init__.py").write_text("raise RuntimeError('imported')")
    assert libraries()["transformers-neuronx"] == Library("transformers-neuronx", None, "installed")
    assert "transformers_neuronx" not in sys.modules


class TestADryRun:
    """Plans for a backend that cannot be used here, and raises nothing."""

    def test_a_library_that_is_not_installed_is_planned_for(self):
        for packages in (None, installed(), installed(nxdi="installed")):
            assert choose(INF2, packages, "llama", dry_run=True) == "nxdi"
        assert choose(INF2, installed(tnx="installed"), "llama", dry_run=True) == "tnx"
        assert choose(INF2, None, "gpt2", dry_run=True) == "tnx"
        assert choose(CPU, None, "llama", model_loader="tnx", dry_run=True) == "tnx"

    def test_a_model_of_no_library_is_planned_for_nevertheless(self):
        assert choose(INF2, None, "t5", dry_run=True) == "nxdi"

    def test_several_cores_are_planned_for_without_a_device(self):
        assert choose(CPU, None, "llama", dry_run=True) == "cpu"
        assert choose(CPU, None, "llama", tensor_parallel_degree=8, dry_run=True) == "nxdi"
        assert choose(CPU, installed(**BOTH), "llama", tensor_parallel_degree=8) == "cpu"
