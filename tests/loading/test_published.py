"""Option files, variables and commands that stand in public repositories, each as a plan of `check`.

A row has what its author wrote: a file, variables or flags, without places of models, secrets and ports. What is right
follows from LMI's and the libraries' sources: the degree, slots, length, type and library that are meant, or the words
of each error, one for one.
"""

import json
import os
import re
import shlex
import textwrap

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.loading import check as check_module
from tests.doubles import remote_doubles
from tests.loading.checking import LAPTOP, ROOT

MODELS = ROOT / "tests" / "planning" / "models"
LLAMA_2_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
"""Sizes that Llama-2-13b has otherwise."""
HUB = {
    # id to a config.json, and values in place of its own
    "HuggingFaceH4/zephyr-7b-beta": ("mistral-7b-v0.1", {}),
    "NousResearch/Hermes-3-Llama-3.1-70B": ("llama-3-70b", {}),
    "NousResearch/Llama-2-13b-chat-hf": ("llama-2-13b", {}),
    "NousResearch/Meta-Llama-3-70B-Instruct": ("llama-3-70b", {}),
    "TheBloke/Llama-2-70B-Chat-fp16": ("llama-2-13b", LLAMA_2_70B),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("tinyllama-1.1b", {}),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("llama-3.1-8b", {}),
    "meta-llama/Llama-2-70b-chat-hf": ("llama-2-13b", LLAMA_2_70B),
    "meta-llama/Llama-2-7b-hf": ("llama-2-7b", {}),
    "meta-llama/Llama-3-70b-hf": ("llama-3-70b", {}),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", {}),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama-3-70b", {}),
    "meta-llama/Meta-Llama-3-8B": ("llama-3-8b", {}),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", {}),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral-7b-instruct-v0.2", {"vocab_size": 32768}),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", {}),
    "nomic-ai/gpt4all-j": ("gpt-j-6b", {}),
    "openlm-research/open_llama_3b": ("llama-2-7b", {"max_position_embeddings": 2048}),
}


def served(degree=None, slots=None, length=None, dtype=None, loader=None):
    found = {
        "tensor_parallel_degree": degree,
        "max_rolling_batch_size": slots,
        "n_positions": length,
        "dtype": dtype,
        "loader": loader,
    }
    return {name: value for name, value in found.items() if value is not None}


FILES = {
    "aws-samples/foundation-model-benchmarking-tool: Mistral on six cores": (
        "inf2.48xlarge",
        """
        engine=Python
        option.entryPoint=djl_python.transformers_neuronx
        option.model_id=mistralai/Mistral-7B-Instruct-v0.3
        option.tensor_parallel_degree=6
        option.n_positions=4096
        option.rolling_batch=auto
        option.max_rolling_batch_size=4
        option.model_loading_timeout=2400
        """,
        served(6, 4, 4096, loader="tnx"),
    ),
    "aws-samples/foundation-model-benchmarking-tool: Hermes 3 with amp": (
        "inf2.48xlarge",
        """
        option.model_id=NousResearch/Hermes-3-Llama-3.1-70B
        option.tensor_parallel_degree=24
        option.amp=f16
        option.attention_layout=BSH
        option.collectives_layout=BSH
        option.context_length_estimate=3072, 3584, 4096
        option.max_rolling_batch_size=8
        option.model_loader=tnx
        option.model_loading_timeout=24000
        option.n_positions=4096
        option.output_formatter=json
        option.rolling_batch=auto
        option.rolling_batch_strategy=continuous_batching
        option.neuron_optimize_level=2
        option.trust_remote_code=true
        """,
        served(24, 8, 4096, "float16", "tnx"),
    ),
    "aws-samples/aws-deep-learning-ami-ubuntu-dcv-desktop: LMI with vLLM, asynchronous": (
        "trn1.32xlarge",
        """
        engine=Python
        option.entryPoint=djl_python.lmi_vllm.vllm_async_service
        option.rolling_batch=disable
        option.async_mode=True
        option.model_id=meta-llama/Meta-Llama-3.1-8B-Instruct
        option.tensor_parallel_degree=8
        option.max_model_len=8192
        option.max_num_batched_tokens=8192
        option.model_loading_timeout=1800
        option.max_rolling_batch_size=8
        option.block_size=16
        option.trust_remote_code=false
        option.enable_prefix_caching=False
        option.enable_chunked_prefill=False
        """,
        served(8, 8, 8192),
    ),
    "didhd/inferentia2-llm: Llama 3 in 8 bits": (
        "inf2.24xlarge",
        """
        engine=Python
        option.entryPoint=djl_python.transformers_neuronx
        option.model_id=meta-llama/Meta-Llama-3-8B
        option.n_positions=8192
        option.rolling_batch=vllm
        option.neuron_optimize_level=1
        option.max_rolling_batch_size=16
        option.tensor_parallel_degree=8
        option.dtype=fp16
        option.enable_mixed_precision_accumulation=true
        option.load_split_model=false
        option.fuse_qkv=true
        option.attention_layout=BSH
        option.load_in_8bit=true
        option.group_query_attention=replicated-heads
        """,
        served(8, 16, 8192, "float16", "tnx"),
    ),
    "aws/amazon-sagemaker-examples: GPT4All-J, with blanks and an old entry point": (
        "inf2.8xlarge",
        """
        engine = Python
        option.entryPoint = djl_python.transformers-neuronx
        option.model_id = nomic-ai/gpt4all-j
        option.tensor_parallel_degree = 2
        option.model_loading_timeout = 2400
        option.n_positions = 512
        """,
        served(2, None, 512, loader="tnx"),
    ),
    "a guide to LMI on Neuron: comments behind values": (
        "inf2.24xlarge",
        """
        option.model_id=meta-llama/Llama-3-70b-hf
        option.task=text-generation
        engine=Python
        option.entryPoint=djl_python.transformers-neuronx
        option.rolling_batch=transformers-neuronx
        option.tensor_parallel_degree=12  # Use all 12 NeuronCores
        option.n_positions=4096
        option.dtype=fp16
        option.model_loading_timeout=1800  # 30 minutes
        option.compiled_graph_path=/opt/ml/model/compiled
        option.trust_remote_code=true
        """,
        ("write tnx", "a comment needs its own line: write 12", "own line: write 1800"),
    ),
}
VARIABLES = {
    "deepjavalibrary/djl-demo: a draft model, and a name that LMI never read": (
        "inf2.48xlarge",
        """
        HF_MODEL_ID=TheBloke/Llama-2-70B-Chat-fp16
        TENSOR_PARALLEL_DEGREE=24
        OPTION_ROLLING_BATCH=auto
        OPTION_MODEL_LOADING_TIMEOUT=3600
        OPTION_SPECULATIVE_DRAFT_MODEL=TinyLlama/TinyLlama-1.1B-Chat-v1.0
        OPTION_N_POSITIONS=1024
        OPTION_ROLLING_BATCH_SIZE=1
        OPTION_ENTRYPOINT=djl_python.transformers_neuronx
        """,
        ("OPTION_ROLLING_BATCH_SIZE; did you mean 'max_rolling_batch_size'",),
    ),
    "philschmid/huggingface-inferentia2-samples: Llama 2 70B": (
        "inf2.48xlarge",
        """
        HF_MODEL_ID=meta-llama/Llama-2-70b-chat-hf
        HF_NUM_CORES=24
        HF_BATCH_SIZE=4
        HF_SEQUENCE_LENGTH=4096
        HF_AUTO_CAST_TYPE=fp16
        MAX_BATCH_SIZE=4
        MAX_INPUT_LENGTH=3686
        MAX_TOTAL_TOKENS=4096
        """,
        served(24, 4, 4096, "float16", "tnx"),
    ),
    "a handbook of SageMaker: TGI on half of the cores": (
        "inf2.48xlarge",
        """
        HF_MODEL_ID=meta-llama/Llama-2-7b-hf
        HF_TASK=text-generation
        HF_NUM_CORES=12
        HF_AUTO_CAST_TYPE=bf16
        HF_BATCH_SIZE=4
        MAX_INPUT_LENGTH=1024
        MAX_TOTAL_TOKENS=2048
        """,
        served(12, 4, 2048, "bfloat16", "tnx"),
    ),
    "huggingface/blog: Zephyr": (
        "inf2.8xlarge",
        """
        HF_MODEL_ID=HuggingFaceH4/zephyr-7b-beta
        HF_NUM_CORES=2
        HF_BATCH_SIZE=4
        HF_SEQUENCE_LENGTH=2048
        HF_AUTO_CAST_TYPE=bf16
        MAX_BATCH_SIZE=4
        MAX_INPUT_LENGTH=1512
        MAX_TOTAL_TOKENS=2048
        """,
        served(2, 4, 2048, "bfloat16"),
    ),
    "huggingface/optimum-neuron: benchmark of TGI": (
        "inf2.48xlarge",
        """
        PORT=8081
        MODEL_ID=meta-llama/Meta-Llama-3.1-8B-Instruct
        HF_AUTO_CAST_TYPE=bf16
        HF_NUM_CORES=8
        MAX_BATCH_SIZE=32
        MAX_INPUT_TOKENS=4000
        MAX_TOTAL_TOKENS=4096
        MAX_CONCURRENT_REQUESTS=512
        """,
        served(8, 32, 4096, "bfloat16"),
    ),
    "huggingface/optimum-neuron: benchmark of vLLM": (
        "trn2.48xlarge",
        """
        SM_ON_PORT=8081
        SM_ON_MODEL=meta-llama/Llama-3.3-70B-Instruct
        SM_ON_TENSOR_PARALLEL_SIZE=32
        SM_ON_BATCH_SIZE=32
        SM_ON_SEQUENCE_LENGTH=4096
        """,
        served(32, 32, 4096),
    ),
    "huggingface/optimum-neuron: Mixtral on SageMaker": (
        "inf2.48xlarge",
        """
        SM_ON_MODEL=mistralai/Mixtral-8x7B-Instruct-v0.1
        SM_ON_BATCH_SIZE=1
        """,
        served(None, 1),
    ),
}
COMMANDS = {
    # a line of variables, and the flags
    "huggingface/text-generation-inference: the guide of the Neuron backend": (
        "inf2.24xlarge",
        """
        HF_AUTO_CAST_TYPE=fp16 HF_NUM_CORES=8
        --model-id meta-llama/Meta-Llama-3-8B --max-batch-size 1 --max-input-length 3164 --max-total-tokens 4096
        """,
        served(8, 1, 4096, "float16"),
    ),
    "vllm-project/vllm-neuron: README": (
        "trn1.32xlarge",
        """

        --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --tensor-parallel-size 32 --max-model-len 2048 --max-num-seqs 4
        --no-enable-prefix-caching --additional-config '{"override_neuron_config": {"skip_warmup": true,
        "enable_bucketing": true, "context_encoding_buckets": [256, 512, 1024, 2048],
        "token_generation_buckets": [256, 512, 1024, 2048]}}'
        """,
        served(32, 4, [256, 512, 1024, 2048]),
    ),
    "vllm-project/vllm-neuron: README on a machine with 24 cores": (
        "inf2.48xlarge",
        """

        --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --tensor-parallel-size 32 --max-model-len 2048 --max-num-seqs 4
        --no-enable-prefix-caching
        """,
        (
            "tensor_parallel_degree=32 .* on inf2; leave it out",
            "32 NeuronCores are needed and 24 can be used",
        ),
    ),
    "a Terraform module of EKS: flags of older versions": (
        "inf2.8xlarge",
        """
        NEURON_RT_NUM_CORES=2 NEURON_RT_VISIBLE_CORES=0,1 VLLM_LOGGING_LEVEL=INFO
        deepseek-ai/DeepSeek-R1-Distill-Llama-8B --device neuron --tensor-parallel-size 2 --max-num-seqs 4
        --block-size 8 --use-v2-block-manager --max-model-len 2048
        """,
        served(2, 4, 2048),
    ),
    "aws-neuron/aws-neuron-sdk: buckets that end below the length": (
        "trn1.32xlarge",
        """
        VLLM_NEURON_FRAMEWORK=neuronx-distributed-inference
        --model meta-llama/Llama-3.1-8B-Instruct --device neuron --tensor-parallel-size 16 --max-num-seqs 1
        --max-model-len 1024 --override-neuron-config '{"enable_bucketing": true,
        "context_encoding_buckets": [256, 512, 1024], "token_generation_buckets": [32, 64, 128, 256, 512, 768],
        "max_context_length": 1024, "seq_len": 1024, "batch_size": 1, "ctx_batch_size": 1, "tkg_batch_size": 1,
        "is_continuous_batching": true}'
        """,
        served(16, 1, [32, 64, 128, 256, 512, 768, 1024]),
    ),
    "vllm-project/vllm: Int8 quantisation": (
        "inf2.xlarge",
        """
        NEURON_CONTEXT_LENGTH_BUCKETS=128,512,1024,2048 NEURON_TOKEN_GEN_BUCKETS=128,512,1024,2048 NEURON_QUANT_DTYPE=s8
        TinyLlama/TinyLlama-1.1B-Chat-v1.0 --max-num-seqs 8 --max-model-len 2048 --block-size 2048 --device neuron
        --quantization neuron_quant --override-neuron-config '{"cast_logits_dtype": "bfloat16"}'
        --tensor-parallel-size 2
        """,
        served(2, 8, [128, 512, 1024, 2048], loader="tnx"),
    ),
    "vllm-project/vllm-neuron: a length that the model does not have": (
        "trn1.32xlarge",
        """

        --model openlm-research/open_llama_3b --tensor-parallel-size 32 --max-model-len 6024 --max-num-seqs 1
        """,
        ("n_positions=6024 .* the model supports 2048 positions",),
    ),
    "awslabs/ai-on-eks-charts: Llama 2 13B on twenty cores": (
        "inf2.48xlarge",
        """

        --model NousResearch/Llama-2-13b-chat-hf --gpu-memory-utilization 0.8 --max-model-len 1024 --max-num-seqs 1
        --max-num-batched-tokens 1024 --tokenizer-pool-size 4 --max-parallel-loading-workers 2
        --pipeline-parallel-size 1 --tensor-parallel-size 20
        """,
        served(20, 1, 1024),
    ),
    "awslabs/ai-on-eks-charts: Llama 3 70B on sixteen cores": (
        "inf2.48xlarge",
        """

        --model NousResearch/Meta-Llama-3-70B-Instruct --gpu-memory-utilization 0.8 --max-model-len 4096
        --max-num-seqs 10 --tokenizer-pool-size 4 --max-parallel-loading-workers 2 --pipeline-parallel-size 1
        --tensor-parallel-size 16
        """,
        served(16, 10, 4096),
    ),
}


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """A machine without Neuron, without variables for models, and with the hub's double alone."""
    monkeypatch.setattr(check_module.machines, "detect", lambda **kwargs: LAPTOP)
    names = re.compile("NEURON_|OPTION_|HF_|SM_|MAX_|MODEL_ID$|PORT$|TENSOR_PARALLEL")
    for name in filter(names.match, dict(os.environ)):
        monkeypatch.delenv(name)
    models = {
        name: json.dumps({**json.loads((MODELS / f"{file}.json").read_text()), **other}).encode()
        for name, (file, other) in HUB.items()
    }
    with remote_doubles.hub(models) as (url, _):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield monkeypatch


def written(path, monkeypatch):
    """Machine, arguments of `check`, what is right, and the name of each row; its variables are set meanwhile."""
    for name, (machine, text, right) in FILES.items():
        file = path / "serving.properties"
        file.write_text(textwrap.dedent(text))
        yield name, machine, [str(file)], right
    for name, (machine, text, right) in VARIABLES.items():
        with monkeypatch.context() as patch:
            for line in text.split():
                patch.setenv(*line.split("=", 1))
            yield name, machine, [], right
    for name, (machine, text, right) in COMMANDS.items():
        variables, _, flags = text.removeprefix("\n").partition("\n")
        with monkeypatch.context() as patch:
            for variable in variables.split():
                patch.setenv(*variable.split("=", 1))
            yield name, machine, shlex.split(flags), right


def test_what_stands_in_public_repositories_is_planned_as_its_author_means(
    environ, tmp_path, capsys
):
    failures = []
    for name, machine, arguments, right in written(tmp_path, environ):
        try:
            cli.main(["check", *arguments, "--instance", machine, "--json"])
            report = json.loads(capsys.readouterr().out)
        except SystemExit:
            report = {"errors": [capsys.readouterr().err], "options": {}, "plan": None}
        errors, got = report["errors"], (report["plan"] or {}).copy()
        got.update({option: entry["value"] for option, entry in report["options"].items()})
        patterns = right if isinstance(right, tuple) else ()
        if len(errors) != len(patterns) or not all(map(re.search, patterns, errors)):
            failures.append(f"{name}: {errors}")
        elif isinstance(right, dict):
            failures += [
                f"{name}: {option} is {got[option]!r}, not {value!r}"
                for option, value in right.items()
                if got[option] != value
            ]
    assert not failures, "\n".join(failures)
