"""Weights that are written after a load: an assignment to a part of a tensor of `nxd_model.weights`.

On a device these tensors are the memory that the graphs read. The rig's are copies of what its workers have, so an
assignment, as torch defines it, is sent to the worker of the tensor's rank. It runs in its turn among the steps.
"""

import torch

from rig_stand_ins import after

MODULES = []
"""The graphs' modules of this worker, each with a copy of the weights."""


class DeviceWeight(torch.Tensor):
    def __setitem__(self, index, value):
        super().__setitem__(index, value)
        ranks, rank, name = self.where
        with ranks.lock:
            ranks.send(ranks.conns[rank], ("weight", name, index, value.detach().clone()))


@after("_nxdi_rig")
def write(rig):
    initialize, receive = rig.RigNxDModel.initialize, rig._recv

    def initialize_and_keep(self, checkpoint, start_rank_tensor):
        initialize(self, checkpoint, start_rank_tensor)
        self.ranks.send = rig._send
        self.weights = [
            {name: placed(tensor, self.ranks, rank, name) for name, tensor in weights.items()}
            for rank, weights in enumerate(checkpoint)
        ]

    def placed(tensor, *where):
        weight = tensor.detach().clone().as_subclass(DeviceWeight)
        weight.where = where
        return weight

    def receive_step(conn):
        while (message := receive(conn))[0] == "weight":
            _, name, index, value = message
            for module in MODULES:
                module.get_parameter(name).data[index] = value
        return message

    rig.RigNxDModel.initialize = initialize_and_keep
    rig._recv = receive_step


@after("neuronx_distributed_inference.models.model_wrapper")
def keep(module):
    load_module = module.DecoderModelInstance.load_module

    def load_and_keep(self):
        load_module(self)
        MODULES.append(self.module)

    module.DecoderModelInstance.load_module = load_and_keep
