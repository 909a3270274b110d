"""Which variables mean several machines, and when they stand in the way."""

import pytest

from djl_python_neuronx.planning.machines import local_degree, obstacle


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, None),
        ({"NEURON_LOCAL_TP": "", "NEURON_RANK_ID": " ", "NEURON_PP_STAGES": ""}, None),
        ({"NEURON_LOCAL_TP": "32", "NEURON_RANK_ID": "0", "NEURON_PP_STAGES": "1"}, None),
        # Addresses alone do no harm: the runtime uses the first on one machine too.
        ({"NEURON_RT_ROOT_COMM_ID": "10.0.0.1:8990", "CPU_COMM_ID": "10.0.0.1:8989"}, None),
        ({"NEURON_LOCAL_TP": "16"}, "NEURON_LOCAL_TP=16"),
        ({"NEURON_LOCAL_TP": "64"}, "NEURON_LOCAL_TP=64"),
        ({"NEURON_RANK_ID": "1"}, "NEURON_RANK_ID=1"),
        ({"NEURON_RANK_ID": "one"}, "NEURON_RANK_ID=one"),
        ({"NEURON_PP_STAGES": "2"}, "NEURON_PP_STAGES=2"),
    ],
)
def test_a_model_on_several_machines_is_not_served(environ, said):
    found = obstacle(32, environ)
    if said is None:
        assert found is None
    else:
        assert said in found
        assert "tensor_parallel_degree=32" in found


@pytest.mark.parametrize(
    ("text", "degree"),
    [("32", 32), (" 8 ", 8), ("", None), ("0", None), ("-1", None), ("all", None), ("9" * 9, None)],
)
def test_cores_of_each_machine(text, degree):
    assert local_degree({"NEURON_LOCAL_TP": text}) == degree
