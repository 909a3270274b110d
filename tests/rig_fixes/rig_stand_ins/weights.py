"""Weights of a graph: with groups of cores the prefill and the decode graphs hold the same name in different shapes.

Each uses its own projection alone (`cte_qkv_proj`, `tkg_qkv_proj`), and a compiled graph has no weight that it does not
use. So a weight of another shape is left out; NaN in its place shows a graph that uses it.
"""

import torch

from rig_stand_ins import after


@after("_nxdi_rig")
def leave_out_unused_weights(rig):
    run, load = rig._worker, torch.nn.Module.load_state_dict

    def load_fitting(self, state_dict, *args, **kwargs):
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        others = [
            name
            for name, value in own.items()
            if name in state_dict and value.shape != state_dict[name].shape
        ]
        for name in others:
            own[name].data.fill_(float("nan"))
        fitting = {name: value for name, value in state_dict.items() if name not in others}
        return load(self, fitting, *args, **kwargs)

    def worker(*args):
        torch.nn.Module.load_state_dict = load_fitting
        run(*args)

    rig._worker = worker
