"""Variables of `option.env` in a model folder's own file: what is passed on."""

from __future__ import annotations

import os

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
DOWNLOADS = (
    *(
        "HF_ENDPOINT",
        "HF_TOKEN_PATH",
        "HF_STORED_TOKENS_PATH",
        "HUGGINGFACE_CO_STAGING",
        "HF_DEBUG",
        "HF_HUB_ENDPOINT",
        "HF_HUB_PROXY",
    ),
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ASSETS_CACHE", "HF_MODULES_CACHE"),
    *("HF_XET_CACHE", "HF_XET_LOG_DEST", "HF_XET_SESSION_DIR_NAME", "HF_XET_SHARD_CACHE_SUBDIR"),
    *("HF_XET_DATA_DEFAULT_CAS_ENDPOINT", "HF_XET_DATA_LOCAL_CAS_SCHEME", "HF_XET_LOG_PREFIX"),
    *("HF_XET", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME", "SERVING_DOWNLOAD_DIR", "DJL_CACHE_DIR"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_PROFILE"),
    *("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CA_BUNDLE"),
    *("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_EC2_METADATA_SERVICE_ENDPOINT"),
    *("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_DATA_PATH", "AWS_USE_FIPS_ENDPOINT"),
    *("http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Servers, proxies, certificates, credentials in files, and places of what is downloaded."""
CODE = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PATH", "HOME", "BASH_ENV", "GCONV_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONBREAKPOINT", "OPENSSL_CONF", "NETRC"),
    *("OMP_TOOL_LIBRARIES", "NCCL_NET_PLUGIN", "FI_PROVIDER_PATH", "PJRT_NEURON_LIBRARY_PATH"),
    *("NCCL_CONF_FILE", "NEURON_CONF_FILE", "XLA_PYTHON_PATHS", "FI_PROVIDER_SO", "OMP_TOOL_LIB"),
    *("KMP_CALL_WRAPPER", "NEURON_LIB_DIR", "NEURON_DSO", "MKL_LIBS"),
    *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "HOSTALIASES", "BOTO_CONFIG", "CC", trust.TRUST),
    *("\xa0HF_ENDPOINT", "hf_endpoint", "TMPDIR"),
    *("NEURON_RT_INSPECT_OUTPUT_DIR", "NEURON_RT_ROOT_COMM_ID", "XLA_DUMP_HLO", "OMP_TOOL_VERBOSE"),
    *("NEURON_RT_DEBUG_OUTPUT", "MALLOC_TRACE", "XLA_LOCAL_CACHE_DIRECTORY", "NEURON_PROFILE"),
    *("XLA_FLAGS", "NEURON_COMPILE_CACHE_URL", "MALLOC_CONF", "NEURON_PARALLEL_COMPILE_ARGS"),
)
"""Code, and places that only engine and compiler write to."""
HARMLESS = (
    *("NEURON_CC_FLAGS", "NEURON_RT_NUM_CORES", "CCOM_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    *("TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN"),
    *("HF_XET_HIGH_PERFORMANCE", "HF_HUB_DOWNLOAD_TIMEOUT", "NEURON_RT_EXEC_TIMEOUT"),
    *("HF_HUB_ENABLE_HF_TRANSFER", "AWS_REGION", "AWS_ACCESS_KEY_ID", "PREDICT_TIMEOUT"),
    *("TENSOR_PARALLEL_DEGREE", "FI_PROVIDER", "PYTHONUNBUFFERED"),
)


# Of the guides of neuronx-cc, transformers-neuronx, NxD and its examples.
FLAGS = (
    "-O1",
    "--optlevel 2 --model-type=transformer --auto-cast=none",
    "--model-type transformer --distribution-strategy=llm-training --retry_failed_compilation",
    "--enable-saturate-infinity --enable-mixed-precision-accumulation --lnc=2 --target trn2",
    "--tensorizer-options='--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=2 --vectorize-strided-dma'",
    "--hbm-scratchpad-page-size=1024 --internal-hlo2tensorizer-options='--verify-hlo=true'",
    "--internal-enable-dge-levels vector_dynamic_offsets --internal-backend-options=--enable-verifier=false",
)
PLACES = (
    *(
        ("NEURON_CC_FLAGS", f"-O1 {flag}", flag.split("=")[0].split()[0])
        for flag in (
            *("--cache_dir=/evil", "--cache_dir evil", "--logfile=evil", "--log=evil", "-o evil"),
            *(
                "--output=evil",
                "--dump=evil",
                "--dump-on-error",
                "--artifacts-dir=evil",
                "--workdir evil",
            ),
        )
    ),
    ("NEURON_CC_FLAGS", "--tensorizer-options='--dump-to=evil -O1'", "--dump-to"),
    ("NEURON_CC_FLAGS", "--tensorizer-options --vectorize-strided-dma --x=evil", "--x"),
    *(
        ("NEURON_CC_FLAGS", f"--target={value}", "its value")
        for value in ("/evil", "$evil", "~evil")
    ),
    *(
        (name, value, "a place")
        for name in ("NEURON_A", "TZ", "LC_ALL", "OMP_B", "RUST_LOG")
        for value in (
            *("/evil", "~/evil", ":/evil", "x:/evil", "../evil", "a=./evil", "x b=/evil"),
            *("s3://evil/x", "http://evil", "file:///evil"),
        )
    ),
)
"""Variable that a file may set, value with a place, and what the warning names."""


def serving(text, environ=OPERATOR, *, source=sources.FILE_NAME, inherited=True):
    """The variables of the process and the warnings, as DJL Serving's Java starts it or as `check` plans it."""
    setting = Setting("env", text, "serving.properties line 7", source, by_user=True)
    variables = sources.worker_variables([setting])
    if inherited:
        environ = sources.with_worker_variables(environ, variables)
    problems = Problems()
    found = trust.serving_environ(environ, variables, problems, inherited=inherited)
    return found, problems.messages("warning")


@pytest.fixture(autouse=True)
def own_variables(monkeypatch):
    """A copy of this process's variables, as one that is not passed on is removed here too."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize("inherited", [True, False])
def test_a_file_chooses_neither_servers_nor_places_nor_code(inherited):
    for name in (*DOWNLOADS, *CODE):
        environ, (warning,) = serving(f"{name}=http://evil", inherited=inherited)
        # Java has replaced the operator's value; elsewhere it stays.
        kept = {n: value for n, value in OPERATOR.items() if n != name or not inherited}
        assert environ == kept, name
        assert "serving.properties line 7" in warning
        assert f"sets {name}, not passed on" in warning
        assert f"{trust.TRUST}={name} (names, separated by commas)" in warning
        assert "evil" not in warning


@pytest.mark.parametrize("name", HARMLESS)
def test_what_files_may_set(name):
    environ, warnings = serving(f"{name}=own")
    assert (environ, warnings) == ({**OPERATOR, name: "own"}, ())


@pytest.mark.parametrize("flags", FLAGS)
def test_compiler_flags_that_files_may_set(flags):
    environ, warnings = serving(f"NEURON_CC_FLAGS={flags}")
    assert (environ, warnings) == ({**OPERATOR, "NEURON_CC_FLAGS": flags}, ())


@pytest.mark.parametrize("inherited", [True, False])
def test_a_value_names_no_place(inherited):
    for name, value, part in PLACES:
        environ, (warning,) = serving(f"{name}={value}", inherited=inherited)
        assert environ == OPERATOR, value
        assert f"sets {name} ({part}), not passed on" in warning
        assert f"{trust.TRUST}={name} (names" in warning
        assert "evil" not in warning
        allowed = {**OPERATOR, trust.TRUST: name}
        environ, warnings = serving(f"{name}={value}", allowed, inherited=inherited)
        assert (environ[name], warnings) == (value, ())


@pytest.mark.parametrize("source", [sources.COMMAND_LINE, sources.ENVIRONMENT])
def test_the_operators_own_option_is_taken(source):
    for name in (*DOWNLOADS, "LD_PRELOAD"):
        environ, warnings = serving(f"{name}=x", source=source)
        assert (environ, warnings) == ({**OPERATOR, name: "x"}, ())


def test_the_operator_allows_variables_by_name():
    allowed = {**OPERATOR, trust.TRUST: "HF_ENDPOINT, LD_PRELOAD"}
    environ, warnings = serving("HF_ENDPOINT=http://mirror,LD_PRELOAD=x", allowed)
    assert (environ["HF_ENDPOINT"], environ["LD_PRELOAD"], warnings) == ("http://mirror", "x", ())
    environ, (warning,) = serving("HF_ENDPOINT=http://mirror,https_proxy=x", allowed)
    assert (environ["HF_ENDPOINT"], "https_proxy" in environ) == ("http://mirror", False)
    assert "HF_ENDPOINT" not in warning


@pytest.mark.parametrize("inherited", [True, False])
def test_a_file_allows_itself_nothing(inherited):
    text = f"HF_ENDPOINT=http://evil,{trust.TRUST}=HF_ENDPOINT"
    environ, warnings = serving(text, inherited=inherited)
    assert environ == OPERATOR
    assert warnings


def test_the_warning_has_whole_names_and_counts_the_others():
    """The operator pastes them, and names that fill the list hide no other."""
    names = sorted(DOWNLOADS)[:40]
    _, (warning,) = serving(",".join(f"{name}=x" for name in names))
    assert f"sets {', '.join(names)}, not passed on" in warning
    assert f"{trust.TRUST}={','.join(names)} (names, " in warning
    _, (warning,) = serving(",".join(f"A{i:02}=x" for i in range(40)) + ",LD_AUDIT=x,LD_PRELOAD=y")
    assert "A38, A39 and 2 more, not passed on" in warning
    assert "A38,A39 (names" in warning


def test_this_process_forgets_what_java_has_set(monkeypatch):
    """Its libraries read the process's own variables."""
    names = ("HF_ENDPOINT", "https_proxy", "LD_PRELOAD", "AWS_CONFIG_FILE", "HF_TOKEN", "LC_ALL")
    for name in names:
        monkeypatch.setenv(name, "from-java")
    serving(",".join(f"{name}=from-java" for name in names))
    assert {name for name in names if name in os.environ} == {"HF_TOKEN", "LC_ALL"}


def test_names_are_those_that_java_sets():
    text = "\x01HF_ENDPOINT\t=\x0bhttp://evil\0junk,HF_TOKEN\0=x,HF_TOKEN\xa0=y,NEURON_A=\ud800"
    setting = Setting("env", text, "o", sources.FILE_NAME, by_user=True)
    values = {name: entry.value for name, entry in sources.worker_variables([setting]).items()}
    assert values == {"HF_ENDPOINT": "http://evil", "HF_TOKEN\xa0": "y", "NEURON_A": "?"}
    environ, (warning,) = serving(",".join(f"EVIL_{i}=x" for i in range(9999)))
    assert environ == OPERATOR
    assert len(warning) < 1500
