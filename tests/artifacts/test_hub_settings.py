"""How the hub's variables are read, and what of them is told."""

import pytest
from huggingface_hub import constants

from djl_python_neuronx.artifacts import hub
from djl_python_neuronx.artifacts.hub import HubSettings
from djl_python_neuronx.errors import ArtifactAccessError


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """Settings of this process, as the library would read them at its import."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "process"))
    monkeypatch.setenv("HOME", str(tmp_path))


CACHES = [
    ({}, "process"),
    ({"HF_HOME": "{}/home"}, "home/hub"),
    ({"HF_HOME": "{}/home", "HUGGINGFACE_HUB_CACHE": "{}/old"}, "old"),
    ({"HUGGINGFACE_HUB_CACHE": "{}/old", "HF_HUB_CACHE": "{}/new"}, "new"),
    ({"HF_HUB_CACHE": " {}/new\n", "HF_HOME": "{}/home"}, "new"),
    ({"HF_HUB_CACHE": " \n", "HF_HOME": "{}/home\n"}, "home/hub"),
    ({"HF_HUB_CACHE": "~/new"}, "new"),
    ({"HF_HOME": "~/home"}, "home/hub"),
]


@pytest.mark.parametrize(("variables", "folder"), CACHES, ids=str)
def test_where_the_cache_is(tmp_path, variables, folder):
    environ = {name: value.format(tmp_path) for name, value in variables.items()}
    assert HubSettings.of(environ).cache_dir == tmp_path / folder


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"])
@pytest.mark.parametrize(
    "call",
    [
        lambda environ: hub.fetch("ours/llama", environ=environ),
        lambda environ: hub.fetch_config("ours/llama", None, environ, origin="test"),
    ],
    ids=["model", "configuration"],
)
def test_the_home_of_nobody_is_named_with_its_variable(call, name):
    with pytest.raises(ArtifactAccessError, match=f"{name} is '~nobody-of-that-name/x'"):
        call({name: "~nobody-of-that-name/x"})


def test_the_process_s_own_cache_in_the_home_of_nobody(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~nobody-of-that-name/hub")
    with pytest.raises(ArtifactAccessError, match="HF_HOME or HF_HUB_CACHE is '~nobody"):
        HubSettings.of({})


@pytest.mark.parametrize(
    ("variables", "offline"),
    [
        ({}, ""),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "no"}, ""),
        ({"HF_HUB_OFFLINE": "1\n"}, "HF_HUB_OFFLINE"),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "True"}, "TRANSFORMERS_OFFLINE"),
        (
            {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
            "HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE",
        ),
    ],
)
def test_who_says_offline(variables, offline):
    assert HubSettings.of(variables).offline == offline


def test_the_process_may_be_offline_by_itself(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert HubSettings.of({}).offline == "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"


def test_a_token_is_stripped_and_the_newer_variable_wins():
    environ = {"HF_TOKEN": " hf_new\n", "HUGGING_FACE_HUB_TOKEN": "hf_old"}
    assert HubSettings.of(environ).token == "hf_new"
    assert HubSettings.of({**environ, "HF_TOKEN": "\n"}).token == "hf_old"


SITES = [
    ("https://hub.example/", "https://hub.example"),
    ("https://me:s3cr@t@hub.example:8080/hf", "https://hub.example:8080/hf"),
    ("https://hub.example/@team/hf", "https://hub.example/@team/hf"),
    ("https://hub.example:8080/@team/hf", "https://hub.example:8080/@team/hf"),
    ("https://me:s3cr@hub.example/@team/hf", "https://hub.example/@team/hf"),
    ("https://me:a%2Fs3cr@[::1]:80", "https://[::1]:80"),
]


@pytest.mark.parametrize(("endpoint", "site"), SITES)
def test_no_password_is_told(endpoint, site):
    settings = HubSettings.of({"HF_ENDPOINT": f"{endpoint}\n", "HF_TOKEN": "hf_s3cr"})
    assert settings.site == site
    assert settings.endpoint == endpoint.rstrip("/")
    assert "s3cr" not in repr(settings)


@pytest.mark.parametrize(
    "password", ["s3cr/t", "s3cr?t", "s3cr#t", "s/3cr@t", "#s3cr", "?s3cr", "8#s3cr"]
)
def test_a_password_that_ends_the_host_is_refused_untold(password):
    environ = {"HF_ENDPOINT": f"https://me:{password}@hub.example"}
    with pytest.raises(ArtifactAccessError, match="HF_ENDPOINT is not a URL") as caught:
        hub.fetch("ours/llama", environ=environ)
    assert "s3" not in str(caught.value)
    assert "3cr" not in str(caught.value)
