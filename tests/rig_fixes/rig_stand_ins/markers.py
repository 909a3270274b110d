"""Marks of layers: custom calls, at which a compiler may divide a graph, that give back what they get."""

from rig_stand_ins import after


@after("neuronx_distributed_inference.models.layer_boundary_marker")
def pass_on(module):
    for marker in (module.ModuleMarkerStart, module.ModuleMarkerEnd):
        marker.forward = staticmethod(
            lambda _context, *values: values[0] if len(values) == 1 else values
        )
