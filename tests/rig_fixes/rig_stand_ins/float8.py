"""Tensors in 8-bit floats, as bytes where torch has nothing for the type on a CPU.

Those are its weights-only loader, between the rig's processes, and `torch.scatter`, which writes the library's cache.
"""

import copyreg
import pickle

from rig_stand_ins import after


def restored(values, name):
    import torch

    return values.view(getattr(torch, name))


@after("_nxdi_rig")
def send_bytes(_module):
    import torch

    def reduce(tensor):
        if tensor.dtype in {torch.float8_e4m3fn, torch.float8_e5m2}:
            return restored, (tensor.view(torch.uint8), str(tensor.dtype).removeprefix("torch."))
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)

    def scatter(input, dim, index, src):
        if input.dtype not in {torch.float8_e4m3fn, torch.float8_e5m2}:
            return plain(input, dim, index, src)
        assert src.dtype == input.dtype
        return plain(input.view(torch.uint8), dim, index, src.view(torch.uint8)).view(input.dtype)

    copyreg.pickle(torch.Tensor, reduce)
    plain, torch.scatter = torch.scatter, scatter
