"""Attention of a prompt to its cached prefix, as the process that compiles has it: the rig has a right one instead.

Nothing closed is stood for: without a kernel the graph is that of the library, with the mask that this package adds.
"""

from rig_stand_ins import after

LIBRARY = {}


@after("neuronx_distributed_inference.modules.attention.attention_base")
def keep(module):
    LIBRARY["own"] = module.NeuronAttentionBase.perform_prefix_prefill


@after("_nxdi_rig")
def undo(rig):
    def perform_prefix_prefill(self, *arguments):
        from djl_python_neuronx.backends.nxdi.masks import masked

        return masked(LIBRARY["own"])(self, *arguments)

    rig._prefix_prefill = perform_prefix_prefill
