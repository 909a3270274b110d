"""Which backend loads, over every mix of machine, libraries and wishes; and how a placeholder is recognised."""

import itertools
import logging
import sys

import pytest

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import BackendUnavailableError
from djl_python_neuronx.planning.backend_choice import (
    Library,
    choose_backend,
    libraries,
    preferred,
)
from djl_python_neuronx.planning.case import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo

NEURON_LOADERS = {name: facts.package for name, facts in NEURON_BACKENDS.items()}
CPU = DeviceInfo(None, 0, 0, 2**33, 2, "0 devices under /dev, no neuron-ls")
INF2 = DeviceInfo("inf2.xlarge", 1, 2, 2**35, 4, "1 devices under /dev, no neuron-ls")
ALL = ("cpu", "nxdi", "tnx")


def installed(**states):
    """The four packages; `tnx="placeholder"` and the like, by loader, `base` for what both stand on."""
    names = {**NEURON_LOADERS, "base": "torch-neuronx", "compiler": "neuronx-cc"}
    return {
        package: Library(package, "1", states.get(short, "missing"))
        for short, package in names.items()
    }


def choose(device, packages, backends=ALL, artifact=None, model_type=None, **options):
    options = ServingOptions(**options)
    return choose_backend(
        options,
        device,
        model_type,
        installed=packages,
        backends=backends,
        artifact_backend=artifact,
    )


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


def test_auto_takes_the_library_that_knows_the_model():
    both = installed(nxdi="installed", tnx="installed")
    assert choose(INF2, both, model_type="qwen3") == "nxdi"
    assert choose(INF2, both, model_type="llama") == "nxdi"
    assert choose(INF2, both, model_type="gpt2") == "tnx"
    with pytest.raises(
        BackendUnavailableError, match="nxdi: it does not support model_type 't5'; supported: "
    ):
        choose(INF2, both, model_type="t5")


@pytest.mark.parametrize("old", ["optimum", "vllm"])
def test_loaders_of_the_old_engine_leave_the_choice_open(old):
    both = installed(nxdi="installed", tnx="installed")
    assert choose(CPU, both, model_loader=old) == "cpu"
    assert choose(INF2, both, model_loader=old) == "nxdi"
    assert choose(INF2, both, artifact="tnx", model_loader=old) == "tnx"


def test_a_placeholder_under_the_real_library_is_named():
    with pytest.raises(BackendUnavailableError, match="torch-neuronx is PyPI's placeholder"):
        choose(INF2, installed(tnx="installed", base="placeholder"))


def test_a_library_without_a_backend_in_this_version_is_told_plainly():
    with pytest.raises(BackendUnavailableError, match="has no tnx backend; it has: cpu"):
        choose(INF2, installed(tnx="installed"), backends=["cpu"])


@pytest.mark.parametrize("tnx", STATES)
def test_auto_without_a_device_is_the_cpu_with_one_warning(tnx, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose(CPU, installed(tnx=tnx)) == "cpu"
    assert len(caplog.records) == 1


def test_asking_for_the_cpu_gives_it_without_a_warning(caplog):
    assert choose(CPU, installed(), model_loader="cpu") == "cpu"
    assert choose(INF2, installed(), model_loader="cpu") == "cpu"
    assert not caplog.records


def test_a_loader_that_was_asked_for_is_never_replaced():
    assert choose(CPU, installed(nxdi="installed", tnx="installed"), model_loader="tnx") == "tnx"
    with pytest.raises(BackendUnavailableError, match="transformers-neuronx is not installed"):
        choose(CPU, installed(), model_loader="tnx")


@pytest.mark.parametrize("state", STATES)
def test_nobody_installs_a_library_for_a_backend_that_is_not_there(state):
    with pytest.raises(BackendUnavailableError, match=r"has no nxdi backend; it has: cpu$"):
        choose(CPU, installed(nxdi=state), backends=["cpu"], model_loader="nxdi")


def test_auto_takes_what_the_artifact_was_compiled_for():
    both = installed(nxdi="installed", tnx="installed")
    assert choose(INF2, both, artifact="tnx") == "tnx"
    with pytest.raises(BackendUnavailableError, match="the model's format"):
        choose(CPU, installed(), artifact="nxdi")


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


class TestPreferred:
    """Which library `auto` means: one function for the server and for check."""

    @pytest.mark.parametrize(
        ("model_type", "options", "expected"),
        [
            ("llama", {}, "nxdi"),
            (None, {}, "nxdi"),
            ("t5", {}, None),
            ("gpt2", {"is_medusa": True}, "tnx"),  # the only one, so its refusal is told
            # options that only transformers-neuronx has, and that change more than speed
            ("llama", {"enable_mixed_precision_accumulation": True}, "tnx"),
            ("llama", {"load_split_model": True}, "tnx"),
            ("llama", {"enable_chunked_prefill": True, "cache_layout": "BSH"}, "tnx"),
            # ... speed alone
            ("llama", {"neuron_optimize_level": 3, "cache_layout": "BSH"}, "nxdi"),
            # a draft without sampling on the device is judged by logits, with it on the device
            ("llama", {"speculative_draft_model": "d"}, "tnx"),
            ("llama", {"speculative_draft_model": "d", "on_device_generation": True}, "nxdi"),
            ("mistral", {"speculative_draft_model": "d"}, "nxdi"),
            ("mixtral", {"quantize": "static_int8", "bf16_rms_norm": True}, "nxdi"),
        ],
    )
    def test_the_first_that_refuses_nothing(self, model_type, options, expected):
        options = ServingOptions(**options)
        assert preferred(options, model_type) == expected
        if expected:
            both = installed(nxdi="installed", tnx="installed")
            found = choose_backend(options, INF2, model_type, installed=both, backends=ALL)
            assert found == expected

    def test_among_what_is_there(self):
        options = ServingOptions(load_split_model=True)
        assert preferred(options, "llama", ["nxdi"]) == "nxdi"
        assert choose(INF2, installed(nxdi="installed"), load_split_model=True) == "nxdi"


class TestADryRun:
    """Plans for a backend that cannot be used here, and raises nothing."""

    def choose(self, device, packages=None, model_type="llama", **options):
        return choose_backend(
            ServingOptions(**options),
            device,
            model_type,
            installed=packages,
            backends=["cpu", "tnx"],
            dry_run=True,
        )

    def test_a_library_that_is_not_installed_is_planned_for(self):
        assert self.choose(INF2) == "tnx"
        assert self.choose(INF2, installed()) == "tnx"
        assert self.choose(INF2, installed(nxdi="installed")) == "tnx"
        assert self.choose(CPU, model_loader="nxdi") == "nxdi"

    def test_a_backend_of_a_later_version_is_planned_for_if_no_other_knows_the_model(self):
        assert self.choose(INF2, model_type="qwen3") == "nxdi"
        assert self.choose(INF2, model_type="t5") == "tnx"

    def test_several_cores_are_planned_for_without_a_device(self):
        assert self.choose(CPU) == "cpu"
        assert self.choose(CPU, tensor_parallel_degree=8) == "tnx"

    def test_rules_about_values_that_are_not_set_yet_refuse_nothing(self):
        options = ServingOptions(token_generation_batches=(1, 2))
        assert preferred(options, "llama") == "nxdi"
