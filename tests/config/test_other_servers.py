"""Every flag and variable of TGI, vLLM and LMI: it sets an option, or a message says what to do instead."""

import json
from pathlib import Path

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.legacy import IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import NAMES
from djl_python_neuronx.config.other_servers import ADVICE, SAME, unread
from djl_python_neuronx.config.resolve import read_settings
from tests.config import server_names as names

SECRET = "s3cret"
MODEL = "owner/name"
KEYWORDS = {"override_neuron_config": {"seq_len": 512, "logical_nc_config": 1}}

OF_SERVE = {
    # flag to the name and the value that `serve` itself has
    "host": ("host", "127.0.0.1"),
    "hostname": ("host", "127.0.0.1"),
    "port": ("port", 9),
    "graceful_termination_timeout": ("drain", 9.0),
    **{name: (name, "file") for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")},
}
BUCKETS = (128, 256, 300)
TAKEN = {
    # flag: value, option, the option's value
    "additional_config": (json.dumps(KEYWORDS), "n_positions", 512),
    "batch_size": ("4", "max_rolling_batch_size", 4),
    "chat_template": ("{{ messages }}", "chat_template", "{{ messages }}"),
    "data_parallel_size": ("2", "replicas", 2),
    "default_chat_template_kwargs": ('{"a": 1}', "chat_template_kwargs", {"a": 1}),
    "dtype": ("bfloat16", "dtype", "bfloat16"),
    "enable_chunked_prefill": (None, "enable_chunked_prefill", True),
    "enable_lora": (None, "enable_lora", True),
    "enable_prefix_caching": (None, "enable_prefix_caching", True),
    "lora_modules": (f"sql={MODEL}", "adapters", {"sql": MODEL}),
    "max_lora_rank": ("64", "max_lora_rank", 64),
    "max_loras": ("2", "max_loras", 2),
    "generation_config": ("vllm", "generation_config", "vllm"),
    "max_batch_size": ("4", "max_rolling_batch_size", 4),
    "max_concurrent_requests": ("50", "max_waiting", 50),
    "max_input_length": ("300", "context_length_estimate", BUCKETS),
    "max_input_tokens": ("300", "context_length_estimate", BUCKETS),
    "max_model_len": ("512", "n_positions", 512),
    "max_num_seqs": ("4", "max_rolling_batch_size", 4),
    "max_total_tokens": ("512", "n_positions", 512),
    "model": (MODEL, "model_id", MODEL),
    "model_id": (MODEL, "model_id", MODEL),
    "num_shard": ("8", "tensor_parallel_degree", 8),
    "payload_limit": ("1000", "max_body_bytes", 1000),
    "pipeline_parallel_size": ("1", "pipeline_parallel_degree", 1),
    "quantization": ("neuron_quant", "quantize", "static_int8"),
    "quantize": ("fp8", "quantize", "static_fp8"),
    "reasoning_parser": ("qwen3", "reasoning_parser", "qwen3"),
    "revision": ("v1", "revision", "v1"),
    "sequence_length": ("512", "n_positions", 512),
    "scheduling_policy": ("priority", "scheduling_policy", "priority"),
    "served_model_name": ("chat", "model_name", ("chat",)),
    "speculative_config": (f'{{"model": "{MODEL}"}}', "speculative_draft_model", MODEL),
    "task": ("text-generation", "task", "text-generation"),
    "otlp_traces_endpoint": (
        "http://collector:4318/v1/traces",
        "otlp_traces_endpoint",
        "http://collector:4318/v1/traces",
    ),
    "tensor_parallel_size": ("8", "tensor_parallel_degree", 8),
    "tool_call_parser": ("hermes", "tool_call_parser", "hermes"),
    "trust_remote_code": (None, "trust_remote_code", True),
}
WITHOUT_EFFECT = {
    # flags that are accepted and listed as ignored, with a value
    "allow_non_cached_model": None,
    "block_size": "32",
    "disable_custom_all_reduce": None,
    "disable_log_requests": None,
    "disable_log_stats": None,
    "distributed_executor_backend": "mp",
    "enforce_eager": None,
    "gpu_memory_utilization": "0.9",
    "max_batch_prefill_tokens": "4096",
    "max_parallel_loading_workers": "2",
    "max_num_batched_tokens": "4096",
    "num_gpu_blocks_override": "512",
    "swap_space": "4",
}

SWITCHES = {*names.TGI_SWITCHES, *names.VLLM_SWITCHES, "allow_non_cached_model"}
FLAGS = {*SWITCHES, *names.TGI_FLAGS, *names.OPTIMUM_FLAGS, *names.VLLM_FLAGS}
ACCEPTED = {**{name: row[0] for name, row in TAKEN.items()}, **WITHOUT_EFFECT}

MAPPED = {
    # variable: value, option, the option's value
    "HF_AUTO_CAST_TYPE": ("fp16", "dtype", "float16"),
    "HF_BATCH_SIZE": ("4", "max_rolling_batch_size", 4),
    "HF_MODEL_ID": (MODEL, "model_id", MODEL),
    "HF_MODEL_QUANTIZE": ("fp8", "quantize", "static_fp8"),
    "HF_MODEL_TRUST_REMOTE_CODE": ("true", "trust_remote_code", True),
    "HF_NUM_CORES": ("8", "tensor_parallel_degree", 8),
    "HF_SEQUENCE_LENGTH": ("512", "n_positions", 512),
    "MAX_BATCH_SIZE": ("4", "max_rolling_batch_size", 4),
    "MAX_CONCURRENT_REQUESTS": ("50", "max_waiting", 50),
    "MAX_INPUT_LENGTH": ("300", "context_length_estimate", BUCKETS),
    "MAX_INPUT_TOKENS": ("300", "context_length_estimate", BUCKETS),
    "MAX_TOTAL_TOKENS": ("512", "n_positions", 512),
    "MODEL_ID": (MODEL, "model_id", MODEL),
    "MODEL_LOADING_TIMEOUT": ("90", "model_loading_timeout", 90.0),
    "NEURON_COMPILED_ARTIFACTS": ("/cache", "compiled_graph_path", "/cache"),
    "NEURON_CONTEXT_LENGTH_BUCKETS": ("128,256", "context_length_estimate", (128, 256)),
    "NEURON_TOKEN_GEN_BUCKETS": ("256,512", "n_positions", (256, 512)),
    "NUM_SHARD": ("8", "tensor_parallel_degree", 8),
    "PAYLOAD_LIMIT": ("1000", "max_body_bytes", 1000),
    "PIPELINE_PARALLEL_DEGREE": ("1", "pipeline_parallel_degree", 1),
    "PREDICT_TIMEOUT": ("90", "predict_timeout", 90.0),
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": ("1", "max_body_bytes", 2**20),
    "SAGEMAKER_MAX_REQUEST_SIZE": ("1000", "max_body_bytes", 1000),
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": ("90", "predict_timeout", 90.0),
    "SAGEMAKER_NUM_MODEL_WORKERS": ("2", "replicas", 2),
    "SAGEMAKER_STARTUP_TIMEOUT": ("90", "model_loading_timeout", 90.0),
    "SERVING_BATCH_SIZE": ("4", "batch_size", 4),
    "SM_NUM_GPUS": ("8", "tensor_parallel_degree", 8),
    "TENSOR_PARALLEL_DEGREE": ("8", "tensor_parallel_degree", 8),
    # with the variable that they belong to
    "HF_MODEL_REVISION": ("v1", "revision", "v1"),
    "HF_REVISION": ("v1", "revision", "v1"),
    "HF_TASK": ("text-generation", "task", "text-generation"),
    "REVISION": ("v1", "revision", "v1"),
}
LISTED = {"MAX_BATCH_PREFILL_TOKENS": "max_rolling_batch_prefill_tokens"}
"""Variables that are listed as ignored, under this name."""
SILENT = {
    # Variables that other programs share.
    *("CMAKE_BUILD_TYPE", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "LD_LIBRARY_PATH"),
    *("LOCAL_RANK", "LOG_COLORIZE", "LOG_LEVEL", "LOGURU_COLORIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("MAX_JOBS", "NO_COLOR", "NVCC_THREADS", "OMP_NUM_THREADS", "VERBOSE"),
    *("K_SCALE_CONSTANT", "Q_SCALE_CONSTANT", "V_SCALE_CONSTANT"),
    # of the kernels of GPUs, which TGI chooses itself
    *("ATTENTION", "COMPUTE_TYPE", "PREFIX_CACHING", "TGI_WIGGLE_ROOM"),
    # of the libraries here, or read here elsewhere
    *("HF_HUB_ENABLE_HF_TRANSFER", "HF_HUB_USER_AGENT_ORIGIN", "HF_TOKEN"),
    *("HUGGINGFACE_HUB_CACHE", "SAGEMAKER_MULTI_MODEL", "SERVING_DOWNLOAD_DIR"),
    *("SERVING_CHUNKED_READ_TIMEOUT", "SERVING_FEATURES", "SERVING_RETRY_THRESHOLD"),
    *("DJL_CACHE_DIR", "DJL_ENTRY_POINT", "SERVING_MAX_WORKERS", "SERVING_MIN_WORKERS"),
    # DJL Serving's own
    *("DJL_CLUSTER_SIZE", "DJL_LEADER_ADDR", "DJL_VENV_DIR", "DJL_WORKER_ADDR_FORMAT"),
    *("MAX_NETTY_BUFFER_SIZE", "MODEL_SERVER_HOME", "PYTHON_EXECUTABLE", "SERVING_FAIL_FAST"),
    *("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "SERVING_JOB_QUEUE_SIZE", "SERVING_LOAD_MODELS"),
    *("SERVING_MAX_REQUEST_SIZE", "SERVING_MODEL_STORE", "SERVING_PROMETHEUS"),
}
VARIABLES = {
    *(name.upper() for name in (*names.TGI_FLAGS, *names.TGI_SWITCHES) if name != "env"),
    *(*names.TGI_VARIABLES, *names.VLLM_VARIABLES, *names.PLUGIN_VARIABLES, *names.LMI_VARIABLES),
}


def settings(overrides=(), environ=None):
    problems = Problems()
    resolved = read_settings(None, None, environ or {}, problems, dict(overrides))
    return resolved, problems


def spellings(name, value):
    """The words of a flag in each way that it may be written."""
    for flag in ("--" + name.replace("_", "-"), "--" + name):
        if value is None:
            yield [flag]
        else:
            yield [flag, value]
            yield [f"{flag}={value}"]


PARSER = cli._parser()


def parsed(words):
    return PARSER.parse_args(["serve", *words])


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_a_flag_of_the_same_meaning_is_taken(name):
    value = ACCEPTED[name]
    assert (value is None) == (name in SWITCHES)
    for words in spellings(name, value):
        # A switch must not take the model for its value.
        several = name in {"lora_modules", "served_model_name"}
        order = [["model", *words]] if several else [[*words, "model"]]
        (arguments,) = map(parsed, order)
        assert arguments.models == ["model"]
        resolved, problems = settings(arguments.option)
        assert problems.messages("error") == ()
        if name in TAKEN:
            _, option, expected = TAKEN[name]
            assert getattr(resolved.options, option) == expected
            assert "command line" in resolved.origins[option]
        else:
            assert resolved.ignored[name] == IGNORED[name]


def test_a_flag_of_serve_itself_is_taken():
    for name, (own, expected) in OF_SERVE.items():
        flag = "--" + name.replace("_", "-")
        assert getattr(parsed([flag, str(expected).removesuffix(".0")]), own) == expected
    assert parsed(["-p", "9"]).port == 9


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("x", "'speculative_config'"),
        ("[1]", "'speculative_config'"),
        ('{"revision": "v1"}', "'speculative_config[revision]'"),
        ('{"method": "medusa"}', "expected draft_model, eagle or eagle3"),
    ],
)
def test_a_speculative_config_that_has_no_options_is_an_error(given, named):
    resolved, problems = settings(parsed(["m", "--speculative-config", given]).option)
    (error,) = problems.messages("error")
    assert named in error
    assert resolved.options.revision is None


def test_several_names_and_short_flags():
    words = ["m", "-tp", "8", "-pp", "1", "-dp", "2", "-m", MODEL, "--served-model-name", "a", "b"]
    arguments = parsed(words)
    assert arguments.models == ["m"]
    options = settings(arguments.option)[0].options
    assert (options.tensor_parallel_degree, options.replicas, options.model_id) == (8, 2, MODEL)
    assert options.model_name == ("a", "b")


NEUTRAL_ONLY = {*names.VLLM_DEFAULTS, *names.VLLM_SWITCHES} - ACCEPTED.keys()
"""Flags that are accepted only where they ask for nothing."""
NO_EFFECT = {
    *("async_scheduling", "disable_frontend_multiprocessing", "enable_flashinfer_autotune"),
    *("enable_auto_tool_choice", "enable_log_deltas", "exclude_tools_when_tool_choice_none"),
    "use_tqdm_on_load",
}
"""Switches of vLLM's own parts: neither value asks for anything."""
ADVICE_BEGINS = ("leave it out", "write ", "set ", "decide", "mean", "put ", "serve ")


def test_what_asks_for_nothing_is_listed_and_anything_else_refused_with_what_to_do(subtests):
    for name in sorted(NEUTRAL_ONLY):
        flag = name.replace("_", "-")
        if name in names.VLLM_SWITCHES:
            neutral, other = [f"--no-{flag}"], [f"--{flag}"]
        else:
            neutral = [f"--{flag}", names.VLLM_DEFAULTS[name]]
            other = [f"--{flag}", "another"]
        with subtests.test(name):
            resolved, problems = settings(parsed([*neutral, "model"]).option)
            assert problems.messages("error") == ()
            assert name in resolved.ignored
            errors = settings(parsed([*other, "model"]).option)[1].messages("error")
            assert len(errors) == (name not in NO_EFFECT)
            for error in errors:
                advice = error.partition(" or nothing: ")[2]
                assert any(word in advice for word in (*ADVICE_BEGINS, "parameter of requests"))


def test_the_models_own_tokenizer_is_taken_and_another_refused(tmp_path):
    for model in (["--model", MODEL], ["-o", f"model_id={MODEL}"]):
        words = ["folder", "--tokenizer", MODEL, *model]
        resolved, problems = settings(parsed(words).option)
        assert problems.messages("error") == ()
        assert "tokenizer" in resolved.ignored
    for folder, tokenizer in ((tmp_path, f"{tmp_path}/"), (Path("model"), "./model")):
        problems = Problems()
        read_settings(None, folder, {}, problems, {"tokenizer": tokenizer})
        assert problems.messages("error") == ()
    (error,) = settings(parsed(["folder", "--tokenizer", "other/model"]).option)[1].messages(
        "error"
    )
    assert "into the model folder" in error


@pytest.mark.parametrize(
    ("text", "length"),
    [("2k", 2000), ("2K", 2048), ("25.6k", 25600), ("1m", 10**6), ("1M", 2**20)],
)
def test_lengths_have_vllms_units(text, length):
    """Source: vLLM 0.16, config/model.py, max_model_len."""
    option = parsed(["model", "--max-model-len", text]).option
    assert settings(option)[0].options.n_positions == length
    environ = {"SM_VLLM_MAX_MODEL_LEN": text}
    assert settings(environ=environ)[0].options.n_positions == length


def test_flags_of_serve_are_accepted_by_check_and_compile():
    words = ["--host", "a", "--port", "8000", "--drain", "5", "--exit-on-error=false"]
    words += ["--ssl-certfile", "c", "--ssl-keyfile", "k"]
    for command in (["check", "model"], ["compile", "model", "--output", "o"]):
        arguments = PARSER.parse_args([*command, *words, "--max-num-seqs", "4"])
        assert settings(arguments.option)[0].options.max_rolling_batch_size == 4


def test_tool_variables_of_an_image_are_read():
    environ = {"SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true", "SM_VLLM_TOOL_CALL_PARSER": "hermes"}
    resolved, problems = settings(environ=environ)
    assert problems.messages("error") == ()
    assert resolved.options.tool_call_parser == "hermes"


REFUSED = sorted(FLAGS - ACCEPTED.keys() - OF_SERVE.keys() - NEUTRAL_ONLY - {"tokenizer"})


def test_any_other_flag_is_refused_with_the_usage_of_serve_and_what_to_do(capsys):
    words = [f"--{name.replace('_', '-')}" for name in REFUSED]
    values = [[] if name in SWITCHES else [SECRET] for name in REFUSED]
    flags = [word for flag, value in zip(words, values, strict=True) for word in (flag, *value)]
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", *flags])
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: djl-neuronx serve")
    assert SECRET not in told
    advice = dict(part.split(" (", 1) for part in told.partition("arguments: ")[2].split("), "))
    assert sorted(advice) == sorted(words)
    for name, flag in zip(REFUSED, words, strict=True):
        assert any(word in advice[flag] for word in ADVICE_BEGINS) or advice[flag].startswith(
            ("-o ", "it is a parameter of requests")
        ), (name, advice[flag])


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--api-key", "-o api_key_file=FILE"),
        ("--allowed-origins", "-o cors_allow_origins="),
        ("--cors-allow-origin", "-o cors_allow_origins="),
        ("--json-output", "--log-format json"),
        ("--otlp-endpoint", "-o otlp_traces_endpoint=http"),
        ("--otlp-service-name", "set OTEL_SERVICE_NAME"),
        ("--prometheus-port", "-o admin_port=PORT"),
        ("--hf-token", "set HF_TOKEN"),
        ("--top-k", "a parameter of requests"),
        ("--config", "option.NAME=VALUE"),
        ("--tool-parser-plugin", "-o tool_call_parser=NAME"),
        ("--lora-adapters", "-o enable_lora=true"),
        ("--default-mm-loras", "no images"),
        ("--mm-processor-kwargs", "no images"),
        ("--exit-on-eror", "did you mean 'exit-on-error'"),
        ("--prot", "did you mean 'port'"),
        ("--ssl-cert-file", "did you mean 'ssl-certfile'"),
        ("--max-num-seq", "did you mean 'max_num_seqs'"),
        ("--no-such-flag", "no flag and no option has this name"),
    ],
)
def test_the_line_to_write_is_named(capsys, flag, line):
    for command, *words in (["serve", flag, SECRET], ["check", f"{flag}={SECRET}"]):
        with pytest.raises(SystemExit):
            cli.main([command, "model", *words])
        told = capsys.readouterr().err
        assert line in told
        assert SECRET not in told


def belongs_to(variable):
    """The variables that have to be set with one."""
    if variable == "REVISION":
        return {"MODEL_ID": MODEL}
    return {"HF_MODEL_ID": MODEL} if MAPPED[variable][1] in {"revision", "task"} else {}


@pytest.mark.parametrize("variable", sorted(MAPPED))
def test_a_variable_of_the_same_meaning_sets_its_option(variable):
    value, option, expected = MAPPED[variable]
    resolved, problems = settings(environ={variable: value, **belongs_to(variable)})
    assert getattr(resolved.options, option) == expected
    assert resolved.origins[option] == f"environment {variable}"
    assert [text for text in problems.messages("warning") if "no effect here" in text] == []
    resolved, problems = settings(environ={variable: "", "HF_MODEL_ID": MODEL})
    assert option not in resolved.origins or option == "model_id"
    assert problems.messages("error") == ()


def test_any_other_variable_is_warned_of(subtests):
    for variable in sorted(VARIABLES - MAPPED.keys() - LISTED.keys()):
        with subtests.test(variable):
            resolved, problems = settings(environ={variable: "1"})
            warnings = [text for text in problems.messages("warning") if variable in text]
            assert (variable in SILENT) == (warnings == [])
            assert all("no effect here; " in text for text in warnings)
            assert set(resolved.origins) == set()
            assert problems.messages("error") == ()


def test_a_variable_without_effect_in_lmi_is_listed():
    for variable, name in LISTED.items():
        assert settings(environ={variable: "4096"})[0].ignored[name] == IGNORED[name]


def test_the_tables_have_no_name_that_no_source_has():
    assert {*MAPPED, *LISTED, *SILENT} <= VARIABLES
    assert {*TAKEN, *WITHOUT_EFFECT, *OF_SERVE} <= FLAGS
    known = {*FLAGS, *VARIABLES, "m", "tp", "pp", "dp"}
    others = {"HUGGINGFACE_HUB_CACHE", "enable_cuda_graphs", "ENABLE_CUDA_GRAPHS"}
    others |= {"speculative_model", "num_speculative_tokens"}  # of vLLM 0.6 to 0.8
    assert {*SAME, *ADVICE} - known <= {*others}
    assert set(SAME.values()) <= set(NAMES.values())
    assert not {*ADVICE} & {*NAMES, *IGNORED, *UNSUPPORTED}


@pytest.mark.parametrize("prefix", ["SM_VLLM_", "SM_ON_"])
def test_a_variable_with_the_name_of_a_flag_is_that_flag(prefix):
    """Source: vLLM 0.16, examples/online_serving/sagemaker-entrypoint.sh; optimum-neuron 213224e, docker/vllm."""
    for name, (value, option, expected) in TAKEN.items():
        variable = prefix + name.upper()
        resolved, problems = settings(environ={variable: "" if value is None else value})
        assert problems.messages("error") == ()
        assert getattr(resolved.options, option) == expected
        assert variable in resolved.origins[option]
    for name, value in WITHOUT_EFFECT.items():
        assert name in settings(environ={prefix + name.upper(): value or ""})[0].ignored
    for name in ("API_KEY", "HF_TOKEN", "ENABLE_SLEEP_MODE"):
        _, problems = settings(environ={prefix + name: SECRET if "ABLE" not in name else "true"})
        (error,) = problems.messages("error")
        assert prefix + name in error
        assert SECRET not in error


class TestPrecedence:
    def test_of_the_file_and_of_option_variables(self, tmp_path):
        (tmp_path / "serving.properties").write_text("option.tensor_parallel_degree=2")
        environ = {"HF_NUM_CORES": "8", "OPTION_N_POSITIONS": "256", "MAX_TOTAL_TOKENS": "512"}
        problems = Problems()
        resolved = read_settings(None, tmp_path, environ, problems)
        assert (resolved.options.tensor_parallel_degree, resolved.options.n_positions) == (2, 256)
        assert problems.messages("warning") == ()
        notes = "".join(problems.messages("note"))
        for variable in ("HF_NUM_CORES", "MAX_TOTAL_TOKENS"):
            assert f"(environment {variable})" in notes

    def test_of_several_variables_the_first_counts_and_the_others_leave_a_note(self):
        order = {
            # option to its variables with a value each, as the table in docs/options.md has them
            "max_rolling_batch_size": {"MAX_BATCH_SIZE": 4, "HF_BATCH_SIZE": 2},
            "n_positions": {"MAX_TOTAL_TOKENS": 2048, "HF_SEQUENCE_LENGTH": 4096},
            "tensor_parallel_degree": {
                "TENSOR_PARALLEL_DEGREE": 8,
                "SM_NUM_GPUS": 4,
                "HF_NUM_CORES": 2,
                "NUM_SHARD": 1,
            },
            "model_loading_timeout": {"SAGEMAKER_STARTUP_TIMEOUT": 60, "MODEL_LOADING_TIMEOUT": 70},
            "max_body_bytes": {"SAGEMAKER_MAX_REQUEST_SIZE": 100, "PAYLOAD_LIMIT": 200},
        }
        variables = {name: str(n) for values in order.values() for name, n in values.items()}
        resolved, problems = settings(environ=dict(reversed(variables.items())))
        assert problems.messages("error") == ()
        notes = "".join(problems.messages("note"))
        for option, values in order.items():
            first, *others = values
            assert resolved.origins[option] == f"environment {first}"
            assert getattr(resolved.options, option) == values[first]
            for variable in others:
                assert f"{option}={variables[variable]} (environment {variable})" in notes

    def test_lengths_of_decode_graphs_are_added_to_the_longest(self):
        buckets = {"NEURON_TOKEN_GEN_BUCKETS": "512,2048"}
        for overrides, environ in (
            ({"max_model_len": "2048"}, {}),
            ({}, {"OPTION_N_POSITIONS": "2048"}),
            ({}, {"SM_VLLM_MAX_MODEL_LEN": "2048"}),
            ({}, {"MAX_TOTAL_TOKENS": "2048"}),
        ):
            resolved, problems = settings(overrides.items(), {**environ, **buckets})
            assert problems.messages("error") == ()
            assert resolved.options.n_positions == (512, 2048), (overrides, environ)
            assert "NEURON_TOKEN_GEN_BUCKETS" in resolved.origins["n_positions"]
        resolved, _ = settings({"n_positions": "4096"}.items(), buckets)
        assert resolved.options.n_positions == (512, 2048, 4096)
        for overrides, environ in (
            ({}, {"OPTION_N_POSITIONS": "1024"}),
            ({"n_positions": "1024"}, {}),
        ):
            resolved, problems = settings(overrides.items(), {**environ, **buckets})
            assert resolved.options.n_positions == 1024
            assert "NEURON_TOKEN_GEN_BUCKETS" in "".join(problems.messages("note"))

    def test_a_revision_goes_to_its_own_model_only(self):
        for other in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
            environ = {"MODEL_ID": MODEL, "REVISION": "v1", other: "org/other"}
            resolved, _ = settings(environ=environ)
            assert (resolved.options.model_id, resolved.options.revision) == ("org/other", None)
            assert other in resolved.ignored["REVISION"]
        resolved, _ = settings(environ={"REVISION": "v1"})
        assert resolved.options.revision is None

    def test_a_folder_with_a_model_is_served_whatever_a_variable_names(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        for variable in ("MODEL_ID", "SM_VLLM_MODEL", "SM_ON_MODEL", "HF_MODEL_ID"):
            resolved = read_settings(None, tmp_path, {variable: MODEL}, Problems())
            assert resolved.options.model_id is None
            assert [*resolved.ignored.values()] == [f"{tmp_path} holds a model"], variable

    def test_a_folders_file_sets_none_of_what_only_operators_may(self, tmp_path):
        """`option.env` reaches the environment of DJL Serving's process."""
        for variable in ("MODEL_ID", "REVISION", "SM_VLLM_MODEL", "SM_ON_TRUST_REMOTE_CODE"):
            (tmp_path / "serving.properties").write_text(f"option.env={variable}=true")
            problems = Problems()
            properties = {"model_dir": str(tmp_path)}
            resolved = read_settings(properties, tmp_path, {variable: "true"}, problems)
            (error,) = problems.messages("error")
            assert variable in error
            assert not resolved.options.trust_remote_code
            assert resolved.options.model_id is None


def test_keywords_of_vllms_additional_config():
    inner = {"seq_len": 512, "a_later_keyword": 1}
    for given, positions, left, warned in (
        ({"override_neuron_config": {}}, None, {}, None),
        ({"override_neuron_config": inner}, 512, {"a_later_keyword": 1}, None),
        ({"override-neuron-config": inner}, 512, {"a_later_keyword": 1}, None),
        ({"override_neuron_config": {"seq_len": 512}, "foo": 1}, 512, {}, "foo: no effect"),
        ({"seq_len": 512}, None, {}, "seq_len: no effect"),
        ({}, None, {}, None),
    ):
        arguments = parsed(["m", "--additional-config", json.dumps(given)])
        resolved, problems = settings(arguments.option)
        assert problems.messages("error") == ()
        assert resolved.options.n_positions == positions
        assert (resolved.options.override_neuron_config or {}) == left
        warnings = "".join(problems.messages("warning"))
        assert warned in warnings if warned else warnings == ""
    resolved, problems = settings({"override_neuron_config": json.dumps({"foo": 1})}.items())
    assert resolved.options.override_neuron_config == {"foo": 1}
    (error,) = settings({"additional_config": json.dumps({"override_neuron_config": [1]})}.items())[
        1
    ].messages("error")
    assert "expected an object" in error


def test_variables_of_kubernetes_are_no_ones_settings():
    """Every pod beside a service named vllm has them (kubernetes.io, "Environment variables")."""
    for name in ("VLLM_SERVICE_HOST", "VLLM_SERVICE_PORT_HTTP", "VLLM_PORT_8000_TCP_ADDR"):
        assert unread(name) == ""
    assert unread("VLLM_USE_V1") != ""
