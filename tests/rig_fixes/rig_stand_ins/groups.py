"""Groups of cores: the library names the first and gives the mesh of all, a replica group in each row, as XLA takes it.

Of gloo's groups a rank gets the one that has it.
"""

import torch
from rig_stand_ins import after


@after("_nxdi_rig")
def make_each_row_a_group(rig):
    run, make = rig._worker, torch.distributed.new_group

    def new_group(ranks=None, *args, pg_options=None, **kwargs):
        if not isinstance(pg_options, dict):
            return make(ranks, *args, pg_options=pg_options, **kwargs)
        rank = torch.distributed.get_rank()
        groups = {tuple(row): make(row) for row in pg_options["xla_pg_options"]["mesh"]}
        return next(group for row, group in groups.items() if rank in row)

    def worker(*args):
        torch.distributed.new_group = new_group
        run(*args)

    rig._worker = worker
