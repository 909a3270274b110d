"""Variables of `option.env` in a model folder's own file, and the credentials that they cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_python_neuronx.config import sources, trust
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.sources import Setting

OPERATOR = {
    "HF_TOKEN": "hf_operator",
    "HUGGING_FACE_HUB_TOKEN": "hf_operator",
    "AWS_ACCESS_KEY_ID": "operator",
    "AWS_SECRET_ACCESS_KEY": "operator",
    "AWS_SESSION_TOKEN": "operator",
    "AWS_PROFILE": "operator",
    "AWS_ROLE_ARN": "operator",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/operator",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/operator",
    "AWS_REGION": "eu-west-1",
    "PATH": "/usr/bin",
}
CACHES = Path("/caches")
HUB = ("HF_ENDPOINT", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH", "HUGGINGFACE_CO_STAGING")
AWS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_STS",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CA_BUNDLE",
)
BOTH = (
    *("http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
CODE = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PATH", "HOME", "BASH_ENV", "GCONV_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONBREAKPOINT", "OPENSSL_CONF", "NETRC"),
    *("OMP_TOOL_LIBRARIES", "NCCL_NET_PLUGIN", "FI_PROVIDER_PATH", "PJRT_NEURON_LIBRARY_PATH"),
    *("NCCL_CONF_FILE", "NEURON_CONF_FILE", "XLA_PYTHON_PATHS", "FI_PROVIDER_SO", "OMP_TOOL_LIB"),
    *("KMP_CALL_WRAPPER", "NEURON_LIB_DIR", "NEURON_DSO", "MKL_LIBS"),
    *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "HOSTALIASES", "BOTO_CONFIG", "CC", trust.TRUST),
    *("\xa0HF_ENDPOINT", "hf_endpoint"),
)
HARMLESS = (
    *(
        "NEURON_CC_FLAGS",
        "NEURON_RT_NUM_CORES",
        "CCOM_SOCKET_IFNAME",
        "XLA_FLAGS",
        "OMP_NUM_THREADS",
        "MALLOC_CONF",
    ),
    *("TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE", "HF_HOME", "HF_TOKEN"),
    *("HF_HUB_ENABLE_HF_TRANSFER", "AWS_REGION", "AWS_ACCESS_KEY_ID", "PREDICT_TIMEOUT"),
    *("TENSOR_PARALLEL_DEGREE", "FI_PROVIDER", "PYTHONUNBUFFERED"),
)


def serving(text, environ=OPERATOR, *, source=sources.FILE_NAME, inherited=True, code=False):
    """The variables of the process and the warnings, as DJL Serving's Java starts it or as `check` plans it."""
    setting = Setting("env", text, "serving.properties line 7", source, by_user=True)
    variables = sources.worker_variables([setting])
    if inherited:
        environ = sources.with_worker_variables(environ, variables)
    problems = Problems()
    found = trust.serving_environ(
        environ, variables, problems, inherited=inherited, trusts_code=code, cache_root=CACHES
    )
    return found, problems.messages("warning")


def has_hub(environ):
    return environ.get("HF_TOKEN") == "hf_operator" and trust.NO_HUB_TOKEN not in environ


def has_aws(environ):
    kept = {name for name, value in environ.items() if "operator" in value and "AWS" in name}
    assert len(kept) in {0, 7}
    return bool(kept) and "AWS_CONFIG_FILE" not in environ


@pytest.mark.parametrize("inherited", [True, False])
@pytest.mark.parametrize(
    ("names", "hub", "aws"),
    [(HUB, False, True), (AWS, True, False), ((*BOTH, *CODE), False, False)],
)
def test_what_each_variable_costs(names, hub, aws, inherited):
    for name in names:
        environ, (warning,) = serving(f"{name}=http://evil", inherited=inherited)
        assert (has_hub(environ), has_aws(environ)) == (hub, aws), name
        assert "serving.properties line 7" in warning
        assert f"{trust.TRUST}={name} " in warning
        assert "operator" not in warning.replace("the operator's", "")
        assert "evil" not in warning


@pytest.mark.parametrize("name", HARMLESS)
def test_what_files_set_costs_nothing(name):
    environ, warnings = serving(f"{name}=own")
    assert (environ, warnings) == ({**OPERATOR, name: "own"}, ())


def test_variables_that_may_load_code_reach_no_other_process():
    for name in CODE:
        assert name not in serving(f"{name}=/evil")[0]
        environ, warnings = serving(f"{name}=/evil", code=True)
        assert environ[name] == "/evil"
        assert has_hub(environ)
        assert not warnings
    environ, warnings = serving("HF_ENDPOINT=http://evil,AWS_PROFILE=x", code=True)
    assert not has_hub(environ)
    assert not has_aws(environ)
    assert warnings


@pytest.mark.parametrize("source", [sources.COMMAND_LINE, sources.ENVIRONMENT])
def test_the_operators_own_option_is_taken(source):
    for name in (*HUB, "AWS_ENDPOINT_URL", *BOTH, "LD_PRELOAD"):
        environ, warnings = serving(f"{name}=x", source=source)
        assert (environ, warnings) == ({**OPERATOR, name: "x"}, ())


def test_the_operators_own_value_is_kept():
    text = "PATH=/evil,HOME=/evil,AWS_PROFILE=operator,HF_ENDPOINT=http://evil"
    environ, (warning,) = serving(text, inherited=False)
    assert environ["PATH"] == "/usr/bin"
    assert "HOME" not in environ
    assert not has_aws(environ)
    assert "Not passed on: AWS_PROFILE, HOME and PATH." in warning
    assert "(names, separated by commas)" in warning
    places = [
        serving(text, {"PATH": path}, inherited=False)[0][trust.HUB_CACHE] for path in ("a", "b")
    ]
    assert places[0] == places[1]


def test_the_operator_allows_variables_by_name():
    allowed = {**OPERATOR, trust.TRUST: "HF_ENDPOINT, LD_PRELOAD"}
    environ, warnings = serving("HF_ENDPOINT=http://mirror,LD_PRELOAD=x", allowed)
    assert (environ["HF_ENDPOINT"], environ["LD_PRELOAD"], warnings) == ("http://mirror", "x", ())
    assert has_hub(environ)
    environ, (warning,) = serving("HF_ENDPOINT=http://mirror,https_proxy=x", allowed)
    assert not has_hub(environ)
    assert "HF_ENDPOINT" not in warning


@pytest.mark.parametrize("inherited", [True, False])
def test_a_file_allows_itself_nothing(inherited):
    text = f"HF_ENDPOINT=http://evil,{trust.TRUST}=HF_ENDPOINT"
    environ, warnings = serving(text, inherited=inherited)
    assert not has_hub(environ)
    assert warnings
    assert trust.TRUST not in environ


def test_a_files_own_credentials_go_to_its_own_servers():
    text = "HF_ENDPOINT=http://own,HF_TOKEN=o,AWS_ENDPOINT_URL=http://own,AWS_ACCESS_KEY_ID=o,AWS_SECRET_ACCESS_KEY=o"
    environ, _ = serving(text)
    names = ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    assert {environ[name] for name in names} == {"o"}
    assert "AWS_SESSION_TOKEN" not in environ
    assert not {value for value in environ.values() if "operator" in value}


def test_a_name_that_java_reads_otherwise_keeps_no_credential():
    """What the file says and what Java has set differ: the operator's token is still there."""
    setting = Setting(
        "env", "HF_TOKEN=x,HF_ENDPOINT=http://evil", "o", sources.FILE_NAME, by_user=True
    )
    java = {**OPERATOR, "HF_ENDPOINT": "http://evil"}
    variables = sources.worker_variables([setting])
    environ = trust.serving_environ(
        java, variables, Problems(), inherited=True, trusts_code=False, cache_root=CACHES
    )
    assert "hf_operator" not in environ.values()


def test_names_are_those_that_java_sets():
    text = "\x01HF_ENDPOINT\t=\x0bhttp://evil\0junk,HF_TOKEN\0=x,HF_TOKEN\xa0=y,NEURON_A=\ud800"
    setting = Setting("env", text, "o", sources.FILE_NAME, by_user=True)
    values = {name: entry.value for name, entry in sources.worker_variables([setting]).items()}
    assert values == {"HF_ENDPOINT": "http://evil", "HF_TOKEN\xa0": "y", "NEURON_A": "?"}
    environ, (warning,) = serving(",".join(f"EVIL_{i}=x" for i in range(9999)))
    assert not has_hub(environ)
    assert len(warning) < 1500


def test_each_server_has_a_cache_of_its_own():
    places = [
        serving(f"{name}={value}")[0].get(trust.HUB_CACHE)
        for name, value in (
            *(
                ("HF_ENDPOINT", "http://a"),
                ("HF_ENDPOINT", "http://b"),
                ("https_proxy", "http://a"),
            ),
            *(("SSL_CERT_FILE", "/a"), ("HF_HOME", "/a"), ("AWS_ENDPOINT_URL", "http://a")),
            *(("LD_PRELOAD", "/a"), (trust.HUB_CACHE, "/a")),
        )
    ]
    own, others = places[:4], places[4:]
    assert len(set(own)) == 4
    assert all(Path(place).parent == CACHES for place in own)
    assert set(others) == {None}
    allowed = {**OPERATOR, trust.TRUST: "HF_ENDPOINT"}
    assert trust.HUB_CACHE not in serving("HF_ENDPOINT=http://a", allowed)[0]
