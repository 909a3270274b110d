"""The arguments of the library that loads the model, written from options. Nothing is imported, built or set."""

from __future__ import annotations

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.intent import continuous_batching, honoured
from djl_python_neuronx.planning.nxdi.arguments import nxdi_arguments
from djl_python_neuronx.planning.tnx.arguments import tnx_arguments


def library_arguments(
    options: ServingOptions,
    loader: str,
    *,
    continuous: bool | None = None,
    capability: Capability | None = None,
    foreign_graphs: bool = False,
    presharded: bool = False,
) -> LibraryArguments:
    """Return the arguments of a backend's library for `options`, which are filled in; none for the cpu backend.

    Options that the library cannot use for the architecture (`capability`) are left out. `continuous`: the model is
    batched continuously; None: as `continuous_batching` decides. `foreign_graphs` and `presharded`: see
    `tnx_arguments`.
    """
    if continuous is None:
        continuous = continuous_batching(options, capability)
    options = honoured(options, capability)
    if loader == "tnx":
        return tnx_arguments(
            options,
            capability or Capability(),
            continuous=continuous,
            foreign_graphs=foreign_graphs,
            presharded=presharded,
        )
    if loader == "nxdi":
        return nxdi_arguments(options, continuous)
    return LibraryArguments()
