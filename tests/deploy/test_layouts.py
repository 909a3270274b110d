"""Files that SageMaker puts beside a model, and calls of its notebooks: Neo, JumpStart and the old LMI container."""

import json
import shutil
from pathlib import Path

import pytest

from djl_python_neuronx.loading.check import check
from djl_python_neuronx.planning import machines
from tests.artifacts import folders
from tests.clients import sdks

MODELS = Path(__file__).parents[1] / "planning" / "models"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

JUMPSTART = {
    "SAGEMAKER_PROGRAM": "inference.py",
    "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code",
    "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
    "SAGEMAKER_REGION": "us-east-2",
    "MODEL_CACHE_ROOT": "/opt/ml/model",
    "SAGEMAKER_ENV": "1",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT": "3600",
    "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
    "ENDPOINT_SERVER_TIMEOUT": "3600",
    "SM_MODEL_DIR": "/opt/ml/model",
}
"""Source: sagemaker-python-sdk, tests/unit/sagemaker/jumpstart/constants.py, meta-textgenerationneuron-llama-2-7b."""


def with_tokenizer(folder):
    for name in TOKENIZER:
        shutil.copy(sdks.MODEL / name, folder / name)
    return folder


def plan(folder, instance="inf2.xlarge", **environ):
    return check(str(folder), environ=environ, overrides={}, machine=machines.named(instance))


def neo(path, *, model=folders.sharded, schema="safetensors"):
    """The output of a compile job of SageMaker Neo for Neuron.

    The input's files without the weights that an index lists, what the container's partition wrote as
    `optimized_model`, graphs in JumpStart's form, and a serving.properties that names the model last.
    Source: djl-serving before 1132e3ab, serving/docker/partition/sm_neo_neuron_partition.py.
    """
    with_tokenizer(model(path))
    index = path / "model.safetensors.index.json"
    if index.exists():
        for name in {*json.loads(index.read_text())["weight_map"].values(), index.name}:
            (path / name).unlink()
    optimized = path / "optimized_model"
    if schema == "compile_only":
        folders.compile_only(optimized)
    else:
        with_tokenizer(folders.lmi_aot(optimized))
        (optimized / "serving.properties").unlink()
    folders.write_json(
        path / "__model_info__.json", {"ModelId": "meta-textgenerationneuron-llama-2-7b"}
    )
    folders.write_json(path / "__script_info__.json", {"Scope": "inference"})
    folders.neff_cache(path / "PRE_COMPILED_NEURON_GRAPH_INFER")
    (path / "serving.properties").write_text(
        f"option.tensor_parallel_degree={folders.TP}\n"
        "option.n_positions=64\n"
        "option.rolling_batch=auto\n"
        "option.max_rolling_batch_size=4\n"
        "option.dtype=bf16\n"
        f"option.partition_schema={schema}\n"
        "engine=Python\n"
        "option.entryPoint=djl_python.transformers_neuronx\n"
        "option.model_id=./optimized_model\n"
    )
    return path


class TestNeo:
    @pytest.mark.parametrize("model", [folders.sharded, folders.huggingface])
    @pytest.mark.parametrize("environ", [{}, {**JUMPSTART, "HF_MODEL_ID": "/opt/ml/model"}])
    def test_the_optimized_model_is_served(self, tmp_path, model, environ):
        report = plan(neo(tmp_path, model=model), **environ)
        assert report.findings.messages("error") == ()
        artifact = report.prepared.artifact
        assert (artifact.format, artifact.path) == ("lmi_aot", tmp_path / "optimized_model")
        assert artifact.compiled == tmp_path / "optimized_model" / "compiled"
        assert [weights.kind for weights in artifact.weights] == ["presharded"]
        assert report.prepared.backend == "tnx"
        assert report.prepared.options.max_rolling_batch_size == 4
        assert report.loadable

    def test_an_option_that_it_was_not_compiled_with(self, tmp_path):
        neo(tmp_path)
        properties = tmp_path / "serving.properties"
        properties.write_text(properties.read_text().replace("n_positions=64", "n_positions=128"))
        errors = plan(tmp_path).findings.messages("error")
        assert any("n_positions" in error and "64" in error for error in errors)

    def test_a_compile_without_a_tokenizer(self, tmp_path):
        """The old container could not serve it either."""
        (error,) = plan(neo(tmp_path, schema="compile_only")).findings.messages("error")
        assert f"no tokenizer in {tmp_path / 'optimized_model'}" in error


def jumpstart(path):
    """A model of JumpStart: weights and configuration, the program of another container, facts of the model."""
    path.mkdir(parents=True, exist_ok=True)
    for file in sdks.MODEL.iterdir():
        if file.suffix in {".json", ".safetensors"}:
            (path / file.name).hardlink_to(file)
    (path / "code").mkdir()
    (path / "code" / "inference.py").write_text("raise SystemExit('not for this container')\n")
    (path / "code" / "requirements.txt").write_text("\n")
    folders.write_json(
        path / "__model_info__.json", {"ModelId": "meta-textgenerationneuron-llama-2-7b"}
    )
    folders.write_json(path / "__script_info__.json", {"Scope": "inference"})
    folders.neff_cache(path / "PRE_COMPILED_NEURON_GRAPH_INFER")
    return path


class TestJumpStart:
    @pytest.mark.parametrize("named", [False, True])
    def test_the_folder_is_the_model(self, tmp_path, named):
        environ = {**JUMPSTART, "OPTION_TENSOR_PARALLEL_DEGREE": "2", "OPTION_DTYPE": "fp16"}
        if named:
            environ["HF_MODEL_ID"] = "/opt/ml/model"
        report = plan(jumpstart(tmp_path), **environ)
        assert report.findings.messages("error") == ()
        assert report.loadable
        assert report.prepared.artifact.path == tmp_path
        assert report.prepared.artifact.format == "huggingface"

    def test_its_graphs_are_a_compilers_cache(self, tmp_path):
        graphs = jumpstart(tmp_path) / "PRE_COMPILED_NEURON_GRAPH_INFER"
        report = plan(tmp_path, **JUMPSTART, OPTION_COMPILED_GRAPH_PATH=str(graphs))
        assert report.findings.messages("error") == ()
        assert report.loadable

    def test_weights_in_a_folder_of_their_own(self, tmp_path):
        jumpstart(tmp_path / "weights")
        environ = {**JUMPSTART, "HF_MODEL_ID": str(tmp_path / "weights")}
        report = check(None, environ=environ, overrides={}, machine=machines.named("inf2.xlarge"))
        assert report.findings.messages("error") == ()
        assert report.prepared.artifact.path == tmp_path / "weights"


NOTEBOOKS = {
    "the user guide's template": {
        "OPTION_ENTRYPOINT": "djl_python.transformers_neuronx",
        "OPTION_ROLLING_BATCH": "auto",
        "TENSOR_PARALLEL_DEGREE": "4",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "8",
        "OPTION_MODEL_LOADING_TIMEOUT": "1600",
    },
    "quantised, with buckets": {
        "OPTION_TENSOR_PARALLEL_DEGREE": "8",
        "OPTION_ROLLING_BATCH": "auto",
        "OPTION_QUANTIZE": "static_int8",
        "OPTION_N_POSITIONS": "2048",
        "OPTION_CONTEXT_LENGTH_ESTIMATE": "256,512,1024",
        "OPTION_NEURON_OPTIMIZE_LEVEL": "2",
        "OPTION_LOW_CPU_MEM_USAGE": "True",
    },
    "as many cores as there are": {
        "SERVING_LOAD_MODELS": "test::Python=/opt/ml/model",
        "OPTION_ENGINE": "Python",
        "OPTION_DTYPE": "fp16",
        "OPTION_TENSOR_PARALLEL_DEGREE": "max",
        "OPTION_OUTPUT_FORMATTER": "jsonlines",
        "HF_TOKEN": "hf_dummy",
        "SAGEMAKER_STARTUP_TIMEOUT": "3600",
    },
}
"""Variables that notebooks give to `sagemaker.Model`.

Source: djl-serving before 1132e3ab, serving/docs/lmi: user_guides/tnx_user_guide.md, deployment_guide.
"""


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.parametrize("data", [True, False])
def test_the_environment_of_a_notebook_is_accepted(tmp_path, name, data):
    """Also with the model itself as model data."""
    shutil.copy(MODELS / "llama-3-8b.json", tmp_path / "config.json")
    with_tokenizer(tmp_path)
    environ, target = {**NOTEBOOKS[name], "HF_MODEL_ID": str(tmp_path)}, None
    if data:
        target = str(tmp_path)
    machine = machines.named("inf2.48xlarge")
    report = check(target, environ=environ, overrides={}, machine=machine)
    assert report.findings.messages("error") == ()
    degree = report.prepared.options.tensor_parallel_degree
    assert (
        degree
        == {"4": 4, "8": 8, "max": 24}[
            environ.get("OPTION_TENSOR_PARALLEL_DEGREE") or environ["TENSOR_PARALLEL_DEGREE"]
        ]
    )


def test_a_notebook_on_jumpstarts_folder_gets_its_answers(tmp_path):
    """`Predictor.predict` of the SageMaker SDK with its JSON serializer, and a stream's parts, through boto3."""
    pytest.importorskip("uvicorn", reason="needs the `server` extra")
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    from djl_python_neuronx.server.app import Application
    from djl_python_neuronx.server.models import Model
    from djl_python_neuronx.service import Service
    from tests.clients.front import forward, front
    from tests.server.running import Running

    environ = {
        **JUMPSTART,
        "OPTION_TENSOR_PARALLEL_DEGREE": "2",
        "OPTION_ROLLING_BATCH": "auto",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "4",
        "OPTION_DTYPE": "fp32",
    }
    application = Application(Model("model"))
    service = Service.load(None, jumpstart(tmp_path), environ=environ)
    application.models[0].service = service
    running = Running(application)
    try:
        with front(forward(running.port)) as url:
            client, question = sdks.sagemaker_client(url), sdks.CHECKS[0]
            answer = client.invoke_endpoint(
                EndpointName="chat",
                InferenceComponentName="chat",
                ContentType="application/json",
                Accept="application/json",
                CustomAttributes="accept_eula=true",
                Body=json.dumps(sdks.lmi_body(question)),
            )
            assert json.loads(answer["Body"].read()) == {"generated_text": question["completion"]}
            kind, text = sdks.sagemaker_stream(
                url, sdks.lmi_body(question, stream=True), InferenceComponentName="chat"
            )
            assert kind == "application/jsonlines"
            lines = [json.loads(line) for line in text.splitlines()]
            assert "".join(line["token"]["text"] for line in lines) == question["completion"]
            assert lines[-1]["generated_text"] == question["completion"]
    finally:
        running.close()
        service.close()
