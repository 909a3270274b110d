"""Collectives of groups of cores, by XLA's definition: each row of a list of groups is a replica group of its own.

Source: torch_xla's documentation of `xla_model.all_gather` and `reduce_scatter`, and XLA's of AllGather and
ReduceScatter. `torch.distributed.new_group` gets the first row with the whole list behind it; of gloo's groups a rank
gets the one that it is in.
"""

from functools import cache

import torch

from rig_stand_ins import REAL, after


@after("_nxdi_rig")
def make_each_row_a_group(rig):
    run, make = rig._worker, torch.distributed.new_group

    @cache
    def own_group(rows):
        groups = {row: make(list(row)) for row in rows}
        rank = torch.distributed.get_rank()
        return next((group, len(row)) for row, group in groups.items() if rank in row)

    def new_group(ranks=None, *args, pg_options=None, **kwargs):
        if not isinstance(pg_options, dict):
            return make(ranks, *args, pg_options=pg_options, **kwargs)
        return own_group(tuple(map(tuple, pg_options["xla_pg_options"]["mesh"])))[0]

    def all_gather(value, dim=0, groups=None, output=None, pin_layout=True):
        group, size = own_group(tuple(map(tuple, groups)))
        parts = [torch.empty_like(value).contiguous() for _ in range(size)]
        torch.distributed.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, dim)

    def reduce_scatter(kind, value, scale, scatter_dim, shard_count, groups=None, pin_layout=True):
        assert kind == "sum"
        group, size = own_group(tuple(map(tuple, groups)))
        assert shard_count == size
        total = value.clone().contiguous()
        torch.distributed.all_reduce(total, group=group)
        return (total * scale).chunk(size, scatter_dim)[torch.distributed.get_rank(group)]

    def worker(*args):
        torch.distributed.new_group = new_group
        REAL["torch_xla.core.xla_model.all_gather"] = all_gather
        REAL["torch_xla.core.xla_model.reduce_scatter"] = reduce_scatter
        run(*args)

    rig._worker = worker
