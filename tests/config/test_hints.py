"""Files that strangers write: what is accepted, and what is refused with which advice."""

import json
from pathlib import Path

import pytest

from djl_python_neuronx.config import hints
from djl_python_neuronx.config.options import NAMES
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.planning import machines
from tests.planning.settings import assess, examine

LLAMA = json.loads((Path(__file__).parents[1] / "planning/models/llama-2-7b.json").read_text())
DEGREE = "tensor_parallel_degree"

ACCEPTED = {
    "option.rolling_batch: tnx": ("rolling_batch", "tnx"),
    "option.rolling_batch = tnx": ("rolling_batch", "tnx"),
    "option.n_positions 2048": ("n_positions", 2048),
    "option.dtype\tbf16": ("dtype", "bfloat16"),
    "  option.dtype=bf16  ": ("dtype", "bfloat16"),
    "option.dtype=float16 ": ("dtype", "float16"),
    "option.dtype=torch.bfloat16": ("dtype", "bfloat16"),
    "option.dtype=HALF": ("dtype", "float16"),
    "option.dtype=bf16\r\noption.n_positions=64\r\n": ("n_positions", 64),
    "! a comment\n# another\noption.n_positions=64": ("n_positions", 64),
    "option.dtype=bf16\\\n": ("dtype", "bfloat16"),
    "\ufeffoption.n_positions=64": ("n_positions", 64),
    "n_positions=64": ("n_positions", 64),
    "model_id: a/b\nn_positions: 64": ("n_positions", 64),
    "option:\n  model_id: a/b\n  n_positions: 64": ("n_positions", 64),
    "[options]\nn_positions=64": ("n_positions", 64),
    "option.async_mode=True": ("async_mode", True),
    "option.trust_remote_code=FALSE": ("trust_remote_code", False),
    "option.n_positions=2_048": ("n_positions", 2048),
    "option.n_positions=2048.0": ("n_positions", 2048),
    "option.n_positions=None": ("n_positions", 4096),
    "option.n_positions=": ("n_positions", 4096),
    "option.context_length_estimate=[128, 256]": ("context_length_estimate", (128, 256)),
    "option.context_length_estimate=128, 256,": ("context_length_estimate", (128, 256)),
    "option.tensor_parallel_size=8": (DEGREE, 8),
    "option.tp_degree=8": (DEGREE, 8),
    "option.max_model_len=2048": ("n_positions", 2048),
    "option.max_num_seqs=4": ("max_rolling_batch_size", 4),
    "option.cache_layout=sbh": ("cache_layout", "SBH"),
    "option.group_query_attention=replicated_heads": ("group_query_attention", "replicated-heads"),
    "option.quantize=int8": ("quantize", "static_int8"),
    "option.quantize=true": ("quantize", "static_int8"),
    "option.quantize=none": ("quantize", None),
    "option.model_id=S3://bucket/key": ("model_id", "S3://bucket/key"),
    "option.model_id=~/models/llama": ("model_id", "~/models/llama"),
    "option.model_id=./a b, c/d#1": ("model_id", "./a b, c/d#1"),
    "option.model_id=https://huggingface.co\noption.model_id=a/b": ("model_id", "a/b"),
    # As in the old engine's own tests: vLLM's settings, which this engine has no use for.
    "option.block_size=32\noption.n_positions=64": ("n_positions", 64),
    "option.device=neuron\noption.n_positions=64": ("n_positions", 64),
    "option.swap_space=4\noption.n_positions=64": ("n_positions", 64),
    "option.gpu_memory_utilization=0.9\noption.n_positions=64": ("n_positions", 64),
    "option.max_num_batched_tokens=4096\noption.n_positions=64": ("n_positions", 64),
}
"""File to an option and its value."""

REFUSED = {
    # quotes, comments, punctuation
    'option.dtype="bf16"': ("dtype", "values have no quotes: write bf16"),
    "option.dtype='bf16'": ("dtype", "write bf16"),
    'option.n_positions="2048"': ("n_positions", "write 2048"),
    'option.async_mode="true"': ("async_mode", "write true"),
    'option.context_length_estimate="128,256"': ("context_length_estimate", "write 128,256"),
    'option.model_id="org/m"': ("model_id", "no quotes: write org/m"),
    'option.compiled_graph_path="s3://b/k"': ("compiled_graph_path", "write s3://b/k"),
    'option.speculative_draft_model="a/b"': ("speculative_draft_model", "write a/b"),
    'option.override_neuron_config="{}"': ("override_neuron_config", "write {}"),
    "option.dtype=bf16 # comment": ("dtype", "a comment needs its own line: write bf16"),
    "option.n_positions=2048 // tokens": ("n_positions", "write 2048"),
    "option.model_id=org/m # mine": ("model_id", "write org/m"),
    "option.model_id=org/m ; mine": ("model_id", "write org/m"),
    'option.dtype="bf16", # comment': ("dtype", "no quotes: write bf16"),
    "option.dtype=bf16;": ("dtype", "write bf16"),
    "option.tensor_parallel_degree=8,": (DEGREE, "write 8"),
    "option.model_id=org/m,": ("model_id", "write org/m"),
    "option.trust_remote_code=true,": ("trust_remote_code", "write true"),
    "option.n_positions==2048": ("n_positions", "write 2048"),
    "option.n_positions=>2048": ("n_positions", "write 2048"),
    "option.model_id:=org/m": ("model_id", "write org/m"),
    "option.dtype=bf16 option.n_positions=64": ("dtype", "its own line: write bf16"),
    "option.dtype=bf16, option.n_positions=64": ("dtype", "its own line: write bf16"),
    "option.dtype=bf16\u00a0": ("dtype", "invisible", "write bf16"),
    # names
    "option.option.dtype=bf16": ("option.dtype", "did you mean 'dtype'"),
    "options.dtype=bf16": ("options.dtype", "did you mean 'option.dtype'"),
    "OPTION.dtype=bf16": ("OPTION.dtype", "did you mean 'option.dtype'"),
    "OPTION_DTYPE=bf16": ("OPTION_DTYPE", "did you mean 'option.dtype'"),
    "option_n_positions=64": ("option_n_positions", "did you mean 'option.n_positions'"),
    "option-dtype=bf16": ("option-dtype", "did you mean 'option.dtype'"),
    ".option.dtype=bf16": (".option.dtype", "did you mean 'option.dtype'"),
    "--option.dtype=bf16": ("--option.dtype", "did you mean 'option.dtype'"),
    "option. dtype=bf16": ("unknown option ''", "ends at its first blank"),
    "option .dtype=bf16": ("unknown option 'option'", "ends at its first blank"),
    "option dtype=bf16": ("unknown option 'option'", "ends at its first blank"),
    "export option.dtype=bf16": ("export", "ends at its first blank"),
    "export OPTION_DTYPE=bf16": ("export", "see docs/options.md"),
    "- option.dtype=bf16": ("'-'", "ends at its first blank"),
    "option.N_POSITIONS=64": ("N_POSITIONS", "did you mean 'n_positions'"),
    "option.DTYPE=bf16": ("DTYPE", "did you mean 'dtype'"),
    "option.n-positions=64": ("n-positions", "did you mean 'n_positions'"),
    "option.nPositions=64": ("nPositions", "did you mean 'n_positions'"),
    "option.tensorParallelDegree=8": ("tensorParallelDegree", f"did you mean '{DEGREE}'"),
    "option.TENSOR-PARALLEL-DEGREE=8": ("TENSOR-PARALLEL-DEGREE", f"did you mean '{DEGREE}'"),
    "option.HF_MODEL_ID=a/b": ("HF_MODEL_ID", "did you mean 'model_id'"),
    "option.serving.dtype=bf16": ("serving.dtype", "did you mean 'dtype'"),
    "option.entrypoint=djl_python_neuronx.handler": ("entrypoint", "did you mean 'entryPoint'"),
    "option.minWorkers=1": ("minWorkers", "minWorkers without 'option.'"),
    # names of other servers
    "option.model=a/b": ("'model'", "did you mean 'model_id'"),
    "option.model_name_or_path=a/b": ("model_name_or_path", "did you mean 'model_id'"),
    "option.tp=8": ("'tp'", f"did you mean '{DEGREE}'"),
    "option.num_shard=8": ("num_shard", f"did you mean '{DEGREE}'"),
    "option.data_parallel_size=2": ("data_parallel_size", "did you mean 'replicas'"),
    "option.num_cores=8": ("num_cores", f"did you mean '{DEGREE}'"),
    "option.max_input_length=64": ("max_input_length", "did you mean 'context_length_estimate'"),
    "option.max_total_tokens=64": ("max_total_tokens", "did you mean 'n_positions'"),
    "option.max_seq_len=64": ("max_seq_len", "did you mean 'n_positions'"),
    "option.seq_len=64": ("seq_len", "did you mean 'n_positions'"),
    "option.max-batch-size=4": ("max-batch-size", "did you mean 'max_rolling_batch_size'"),
    "option.auto_cast_type=bf16": ("auto_cast_type", "did you mean 'dtype'"),
    "option.quantization=awq": ("quantization", "did you mean 'quantize'"),
    "option.kv_cache_dtype=fp8": ("kv_cache_dtype", "did you mean 'kv_cache_quantize'"),
    "option.speculative_model=a/b": ("speculative_model", "did you mean 'speculative_draft_model'"),
    "option.num_speculative_tokens=3": ("num_speculative", "did you mean 'speculative_length'"),
    "option.pipeline_parallel_size=1": ("pipeline", "did you mean 'pipeline_parallel_degree'"),
    "option.temperature=0.7": ("temperature", "it is a parameter of requests"),
    "option.max_new_tokens=64": ("max_new_tokens", "it is a parameter of requests"),
    "option.port=8080": ("'port'", "see docs/options.md"),
    # types and words
    "option.dtype=int8": ("dtype", "write option.quantize=int8"),
    "option.dtype=fp8": ("dtype", "write option.quantize=fp8"),
    "option.quantize=bf16": ("quantize", "write option.dtype=bf16"),
    "option.attention_layout=SBH": ("attention_layout", "write option.cache_layout=SBH"),
    "option.dtype=bfloat": ("dtype", "write bf16"),
    "option.dtype=bfp16": ("dtype", "write bf16"),
    "option.dtype=float64": ("dtype", "expected auto, fp32"),
    "option.quantize=awq": ("quantize", "expected static_int8"),
    "option.async_mode=enabled": ("async_mode", "write true"),
    "option.async_mode=disabled": ("async_mode", "write false"),
    "option.rolling_batch=true": ("rolling_batch", "write tnx"),
    "option.rolling_batch=false": ("rolling_batch", "write disable"),
    "option.rolling_batch=disabled": ("rolling_batch", "write disable"),
    "option.rolling_batch=transformers-neuronx": ("rolling_batch", "write tnx"),
    "option.rolling_batch=trtllm": ("rolling_batch", "write tnx"),
    "option.model_loader=transformers_neuronx": ("model_loader", "write tnx"),
    "option.rolling_batch=continuous_batching": ("rolling_batch", "write tnx"),
    "option.async_mode=flase": ("async_mode", "did you mean 'false'"),
    "option.fuse_qkv=ture": ("fuse_qkv", "did you mean 'true'"),
    "option.quantize=static-int8": ("quantize", "did you mean 'static_int8'"),
    "option.dtype=bf-16": ("dtype", "did you mean 'bf16'"),
    "option.partition_schema=compile-only": ("partition_schema", "did you mean 'compile_only'"),
    "option.output_formatter=jsonline": ("output_formatter", "did you mean 'jsonlines'"),
    'option.load_in_8bit="true"': ("load_in_8bit", "no quotes: write true"),
    "option.load_in_8bit=tru": ("load_in_8bit", "did you mean 'true'"),
    'option.revision="main"': ("revision", "write main"),
    "option.model_name=mine # x": ("model_name", "write mine"),
    "option.neuron_optimize_level=-O2": ("neuron_optimize_level", "write 2"),
    # numbers
    "option.n_positions=8k": ("n_positions", "numbers have no unit: write 8192"),
    "option.n_positions=2048 tokens": ("n_positions", "write 2048"),
    "option.n_positions=2,048": ("n_positions", "write 2048"),
    "option.n_positions=1e999": ("n_positions", "expected a whole number"),
    "option.n_positions=0": ("n_positions", "expected a whole number"),
    "option.n_positions=auto": ("n_positions", "leave the option out"),
    "option.n_positions=max": ("n_positions", "leave the option out"),
    "option.tensor_parallel_degree=auto": (
        DEGREE,
        "leave the option out for its default, or for the most: write max",
    ),
    "option.tensor_parallel_degree=all": (DEGREE, "the word is another: write max"),
    "option.tensor_parallel_degree=8x": (DEGREE, "write 8"),
    "option.tensor_parallel_degree=3": (
        DEGREE,
        "does not take it on inf2; leave it out, or set 1, 2, 4, 6, 8, 12, 16, 20 or 24",
    ),
    "option.context_length_estimate=128 256 512": ("context_length", "write 128,256,512"),
    "option.context_length_estimate=128;256": ("context_length", "write 128,256"),
    "option.context_length_estimate=1k,2k": ("context_length", "write 1024,2048"),
    "option.context_length_estimate=128,,256": ("context_length", "write 128,256"),
    "option.context_length_estimate=auto": ("context_length", "leave the option out"),
    "option.predict_timeout=2m": (
        "predict_timeout",
        "times are in seconds, sizes in bytes: write 120",
    ),
    "option.predict_timeout=120s": ("predict_timeout", "write 120"),
    "option.predict_timeout=2 minutes": ("predict_timeout", "write 120"),
    "option.tensor_parallel_degree=24 cores": (DEGREE, "write 24"),
    "option.tensor_parallel_degree=$TP": (DEGREE, "a placeholder is not replaced"),
    "option.model_loading_timeout=1 hour": ("model_loading_timeout", "write 3600"),
    "option.max_body_bytes=6MB": ("max_body_bytes", "sizes in bytes: write 6291456"),
    "option.max_rolling_batch_size=auto": ("max_rolling_batch_size", "leave the option out"),
    # JSON
    "option.override_neuron_config={sparse: true}": ("override", 'write {"sparse": true}'),
    'option.override_neuron_config={"a": 1': ("override", "expected a JSON object"),
    "option.on_device_generation={top_k: 5}": ("on_device", 'write {"top_k": 5}'),
    # models
    "option.model_id=https://huggingface.co/org/m": ("model_id", "owner/name: write org/m"),
    "option.model_id=https://huggingface.co/org/m/tree/main": ("model_id", "write org/m"),
    "option.model_id=hf://org/m": ("model_id", "write org/m"),
    "option.model_id=https://b.s3.us-east-1.amazonaws.com/k/": ("model_id", "write s3://b/k/"),
    "option.model_id=https://s3.us-east-1.amazonaws.com/b/k": ("model_id", "write s3://b/k"),
    "option.model_id=https://s3.console.aws.amazon.com/s3/buckets/b?region=x&prefix=k/": (
        "model_id",
        "write s3://b/k/",
    ),
    "option.model_id=arn:aws:s3:::b/k": ("model_id", "write s3://b/k"),
    "option.model_id=s3:/b/k": ("model_id", "write s3://b/k"),
    "option.model_id=file:///models/m": ("model_id", "write /models/m"),
    "option.model_id=$MODEL": ("model_id", "a placeholder is not replaced"),
    "option.model_id={{model_id}}": ("model_id", "a placeholder is not replaced"),
    "option.model_id=<your model>": ("model_id", "a placeholder is not replaced"),
    "option.model_id=$HOME/models/m": ("model_id", "a placeholder is not replaced"),
    "option.speculative_draft_model=hf://org/m": ("speculative_draft_model", "write org/m"),
    # files
    "option.model_id=C:\\models\\m": ("model_id", "drops the backslash of \\m", "write /"),
    "option.model_id=C:\\temp\\new": ("model_id", "escapes", "write C:/temp/new"),
    "option.model_id=.\\models": ("model_id", "drops the backslash"),
    "a=b\noption.model_id=C:\\users\\me": ("line 2", "backslash"),
    "a=b\n\noption.model_name=\\u12": ("line 3", "uXXXX"),
    '{"option.dtype": "bf16"}': ("JSON", "option.NAME=VALUE"),
    '{\n  "model_id": "a/b"\n}': ("JSON", "option.NAME=VALUE"),
    "<properties/>": ("XML", "option.NAME=VALUE"),
    # what Java reads in another way
    "option.async_mode=yes": ("async_mode", "as false; write true"),
    "option.async_mode=1": ("async_mode", "as false; write true"),
    "option.tensor_parallel_degree=MAX": ("does not start", "or max"),
    "option.rolling_batch=DISABLE": ("rolling_batch", "write it in lower case"),
    "engine=MPI": ("engine", "set engine=Python"),
    # two settings
    "option.quantize=static_int8\noption.load_in_8bit=false": ("quantize", "keep one"),
    "option.partition_schema=optimum\noption.save_mp_checkpoint_path=/o": ("partition", "set safe"),
}
"""File to words of one of its errors."""

WARNED = {
    "N_POSITIONS=64": ("N_POSITIONS", "did you mean 'n_positions'"),
    "TENSOR_PARALLEL_DEGREE=8": ("option.<name>", f"did you mean '{DEGREE}'"),
    "HF_MODEL_ID=a/b": ("option.<name>", "did you mean 'model_id'"),
    "djl.dtype=bf16": ("djl.dtype", "did you mean 'dtype'"),
    "-o dtype=bf16": ("-o", "ends at its first blank"),
    "option.model_name=caf\u00e9": ("ISO-8859-1", "write caf\\u00e9"),
    "option.partition_schema=optimum": ("partition_schema", "no effect"),
    "engine=python": ("engine", "set engine=Python"),
    "engine=PyTorch": ("engine", "set engine=Python"),
    "option.entryPoint=djl_python.transformers_neuronx": ("djl_python_neuronx.handler",),
    "option.n_positions=4096,2048,1024": ("n_positions=1024,2048,4096", "ascending order"),
    "option.context_length_estimate=256,256,128": ("=128,256", "each once"),
}
"""File to words of one of its warnings or notes."""


def judged(folder, text):
    """The settings of a file as a start on an inf2.48xlarge would see them, with all problems."""
    if not text.startswith("{") and "option.model_id" not in text:
        text += "\noption.model_id=org/m"
    content = text if isinstance(text, bytes) else text.encode()
    (folder / "serving.properties").write_bytes(content)
    settings, errors = examine(None, folder, {})
    done, more = assess(settings, LLAMA, machines.named("inf2.48xlarge"), "tnx")
    return done, [str(error) for error in (*errors, *more)]


def has(messages, words):
    return any(all(word in message for word in words) for message in messages)


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_java_reads_too_is_accepted(tmp_path, text):
    settings, errors = judged(tmp_path, text)
    name, value = ACCEPTED[text]
    assert errors == []
    assert getattr(settings.options, name) == value


@pytest.mark.parametrize("text", REFUSED)
def test_a_mistake_is_refused_with_the_right_line(tmp_path, text):
    _, errors = judged(tmp_path, text)
    assert has(errors, REFUSED[text]), errors


def test_a_number_in_other_digits_is_not_said_to_end_in_something_invisible(tmp_path):
    _, errors = judged(tmp_path, "option.n_positions=２０４８")
    assert has(errors, ("n_positions", "lengths such as"))
    assert "invisible" not in "".join(map(str, errors))


@pytest.mark.parametrize("text", WARNED)
def test_what_is_probably_meant_otherwise_is_said(tmp_path, text):
    settings, errors = judged(tmp_path, text)
    assert errors == []
    messages = [problem.message for problem in settings.problems]
    assert has(messages, WARNED[text]), messages


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_named(tmp_path, encoding):
    (tmp_path / "serving.properties").write_bytes("option.dtype=bf16".encode(encoding))
    _, errors = examine(None, tmp_path, {})
    assert has(map(str, errors), ("UTF-16", "save it as UTF-8"))


def test_advice_names_what_exists():
    assert set(hints.OTHERS.values()) <= set(NAMES)


def test_all_cores_keep_the_place_where_they_were_asked_for(tmp_path):
    settings, _ = judged(tmp_path, "option.tensor_parallel_degree=max")
    origin = settings.origins[DEGREE]
    assert origin.startswith(f"{tmp_path}/serving.properties line 1: the largest")


def test_a_folder_without_a_model_names_the_option(tmp_path):
    (tmp_path / "serving.properties").write_text("option.dtype=bf16")
    (message,) = check(str(tmp_path), environ={}, overrides={}).findings.messages("error")
    assert message.startswith("no model: set option.model_id")


def test_a_name_that_is_refused_is_the_only_error(tmp_path):
    (tmp_path / "serving.properties").write_text("option.model_id=hf://a/b")
    (message,) = check(str(tmp_path), environ={}, overrides={}).findings.messages("error")
    assert "write a/b" in message


def test_a_file_of_weights_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for name in ("model.safetensors", str(tmp_path / "model.safetensors")):
        (tmp_path / "serving.properties").write_text(f"option.model_id={name}")
        (message,) = check(str(tmp_path), environ={}, overrides={}).findings.messages("error")
        assert "is a file; name the folder" in message
