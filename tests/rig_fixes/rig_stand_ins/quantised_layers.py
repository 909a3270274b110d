"""Layers with weights in 8 bits, whose weights are not initialised: on a device all are those of the checkpoint.

The library initialises them where modules run on a CPU alone (`get_aot_mode`), and cuts the columns of a weight that is
divided by columns to nothing there.
"""

from rig_stand_ins import after


@after("neuronx_distributed.quantization.quantization_layers")
def leave_uninitialised(module):
    def initialise(param, partition_dim, num_partitions, stride=1, **_):
        module.set_tensor_model_parallel_attributes(
            tensor=param,
            is_parallel=True,
            dim=partition_dim,
            stride=stride,
            num_partitions=num_partitions,
        )

    module._initialize_parameter_cpu = initialise
