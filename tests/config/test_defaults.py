"""Values that follow from the model and the machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python_neuronx.config import defaults
from djl_python_neuronx.config.defaults import ModelFacts
from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.resolve import complete, resolve
from djl_python_neuronx.errors import IncompatibleOptionsError

CPU = DeviceInfo(None, 0, 0, 2**40, 6, "")
INF2 = DeviceInfo("inf2.8xlarge", 1, 2, 2**35, 32, "")
TINY_LLAMA = {
    "model_type": "llama",
    "max_position_embeddings": 2048,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "torch_dtype": "float16",
}


def completed(config, device, loader, **options):
    resolved = resolve(None, None, {}, {"model_id": "m", **options})
    return complete(resolved, config, device, loader)


class TestComplete:
    def test_nothing_is_left_open(self):
        for device, loader in ((CPU, "cpu"), (INF2, "nxdi")):
            options = completed(TINY_LLAMA, device, loader).options
            assert options.dtype != "auto"
            assert isinstance(options.tensor_parallel_degree, int)
            for name in ("n_positions", "context_length_estimate", "max_rolling_batch_size"):
                assert getattr(options, name)

    def test_values_on_a_cpu(self):
        resolved = completed(TINY_LLAMA, CPU, "cpu")
        assert resolved.options.dtype == "float32"
        assert resolved.options.n_positions == 2048
        assert resolved.options.context_length_estimate == (128, 256, 512, 1024, 2048)
        assert resolved.options.max_rolling_batch_size == 32
        assert resolved.options.tensor_parallel_degree == 1
        assert resolved.options.cpu_threads is None  # the backend counts the physical cores
        assert resolved.origins["dtype"].startswith("default: ")
        assert resolved.origins["model_id"] == "command line"

    def test_values_on_a_device(self):
        options = completed(TINY_LLAMA, INF2, "tnx", tensor_parallel_degree="max").options
        assert (options.dtype, options.tensor_parallel_degree) == ("float16", 2)

    def test_what_was_set_stays(self):
        given = {
            "dtype": "bf16",
            "n_positions": "64",
            "context_length_estimate": "16,32",
            "cpu_threads": "1",
        }
        options = completed(TINY_LLAMA, CPU, "cpu", **given).options
        assert (options.dtype, options.n_positions, options.cpu_threads) == ("bfloat16", 64, 1)
        assert options.context_length_estimate == (16, 32)

    def test_a_file_for_inferentia_can_be_tried_on_a_cpu(self):
        given = {"tensor_parallel_degree": "8", "dtype": "fp16"}
        resolved = completed(TINY_LLAMA, CPU, "cpu", **given)
        assert "tensor_parallel_degree" in resolved.ignored
        assert resolved.options.dtype == "float32"
        assert "float16" in resolved.origins["dtype"]
        assert not completed(TINY_LLAMA, INF2, "tnx", **given).ignored

    def test_options_that_do_nothing_are_listed(self):
        assert "cpu_threads" in completed(TINY_LLAMA, INF2, "tnx", cpu_threads="4").ignored
        assert "cpu_threads" not in completed(TINY_LLAMA, CPU, "cpu", cpu_threads="4").ignored
        assert "revision" in completed(TINY_LLAMA, CPU, "cpu", revision="main").ignored
        trusting = completed(TINY_LLAMA, CPU, "cpu", revision="main", trust_remote_code="true")
        assert "revision" not in trusting.ignored

    @pytest.mark.parametrize(
        ("config", "told", "expected"),
        [
            ({}, "bfloat16", "bfloat16"),
            ({}, "float16", "float32"),
            ({}, "f8_e4m3", "float32"),
            ({}, None, "float32"),
            ({"torch_dtype": "float32"}, "bfloat16", "float32"),
        ],
    )
    def test_the_weight_files_tell_the_dtype_if_the_configuration_does_not(
        self, config, told, expected
    ):
        resolved = resolve(None, None, {}, {"model_id": "m"})
        assert complete(resolved, config, CPU, "cpu", told).options.dtype == expected

    @pytest.mark.parametrize(
        ("longest", "positions"), [("64,512", 2048), ("4096", 4096), ("8192", 8192)]
    )
    def test_prompts_that_were_asked_for_fit(self, longest, positions):
        config = {**TINY_LLAMA, "max_position_embeddings": 8192}
        options = completed(config, CPU, "cpu", context_length_estimate=longest).options
        assert options.n_positions == positions

    @pytest.mark.parametrize("name", ["n_positions", "context_length_estimate"])
    def test_what_the_model_cannot_do_is_refused_with_its_origin_and_nothing_else(self, name):
        with pytest.raises(IncompatibleOptionsError, match="2048 positions") as caught:
            completed(TINY_LLAMA, CPU, "cpu", **{name: "4096"})
        assert f"{name}=" in str(caught.value)
        assert "command line" in str(caught.value)
        assert "default" not in str(caught.value)


class TestFacts:
    def test_of_a_grouped_query_model(self):
        facts = ModelFacts.from_config(TINY_LLAMA)
        assert facts == ModelFacts(2048, "float16", 2 * 22 * 4 * 64)

    @pytest.mark.parametrize(
        ("config", "facts"),
        [
            (
                {"n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768},
                (1024, None, 2 * 12 * 768),
            ),
            (
                {"n_positions": 8, "n_layer": 1, "n_head": 4, "n_embd": 32, "multi_query": True},
                (8, None, 2 * 8),
            ),
            ({"seq_length": 2048, "dtype": "bfloat16"}, (2048, "bfloat16", None)),
            (
                {"text_config": {"max_position_embeddings": 64}, "torch_dtype": "torch.float32"},
                (64, "float32", None),
            ),
            ({}, (None, None, None)),
            (
                {"n_positions": "1024", "max_position_embeddings": True, "dtype": 7},
                (None, None, None),
            ),
        ],
    )
    def test_of_others(self, config, facts):
        assert ModelFacts.from_config(config) == ModelFacts(*facts)


class TestPositions:
    def test_the_cache_of_all_slots_fits_into_half_of_a_cpus_memory(self):
        facts = ModelFacts.from_config(TINY_LLAMA)
        small = DeviceInfo(None, 0, 0, 2**30, 2, "")
        positions = defaults.n_positions(facts, small, "cpu", slots=32)
        needed = 32 * positions * facts.cache_values_per_token * 4
        assert needed <= 2**29 < 2 * needed

    def test_the_dtype_that_was_set_is_the_one_that_is_sized(self):
        config = {**TINY_LLAMA, "dtype": "bfloat16"}
        small = DeviceInfo(None, 0, 0, 2**30, 2, "")
        stored = completed(config, small, "cpu").options.n_positions
        for dtype in ("fp32", "fp16"):  # float16 is computed in float32
            assert completed(config, small, "cpu", dtype=dtype).options.n_positions == stored // 2

    @given(memory=st.integers(1, 2**42), limit=st.integers(1, 2**20), slots=st.integers(1, 256))
    def test_never_more_than_the_model_and_never_nothing(self, memory, limit, slots):
        facts = ModelFacts(limit, "float32", 2**15)
        machine = DeviceInfo(None, 0, 0, memory, 2, "")
        for loader in ("cpu", "nxdi"):
            positions = defaults.n_positions(facts, machine, loader, slots)
            assert min(limit, 64) <= positions <= min(limit, defaults.MAX_POSITIONS)


@pytest.mark.parametrize(
    ("stored", "on_cpu", "on_device"),
    [
        ("float16", "float32", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
        (None, "float32", "float32"),
    ],
)
def test_dtype(stored, on_cpu, on_device):
    facts = ModelFacts(dtype=stored)
    assert (defaults.dtype_of(facts, "cpu"), defaults.dtype_of(facts, "tnx")) == (on_cpu, on_device)
