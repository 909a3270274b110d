"""From options to the arguments of the library that loads the model.

Pure: nothing is imported, built or set. A backend makes the library's objects of the plain values given here and
applies the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.intent import continuous_batching, honoured
from djl_python_neuronx.planning.nxdi.arguments import nxdi_arguments
from djl_python_neuronx.planning.tnx.arguments import tnx_arguments

_WRITERS: Mapping[str, Callable[[ServingOptions, bool], LibraryArguments]] = MappingProxyType(
    {"tnx": tnx_arguments, "nxdi": nxdi_arguments}
)
"""Loader to what writes the arguments of its library."""


def library_arguments(
    options: ServingOptions,
    loader: str,
    *,
    continuous: bool | None = None,
    capability: Capability | None = None,
) -> LibraryArguments:
    """The arguments that `options` (filled in) mean for a library; none for the cpu loader.

    `capability` is what the library can do with the architecture: what it cannot use is not among the arguments.
    `continuous` tells whether the model is batched continuously; None: as `continuous_batching` decides.
    """
    if continuous is None:
        continuous = continuous_batching(options, capability)
    writer = _WRITERS.get(loader)
    if writer is None:
        return LibraryArguments()
    arguments = writer(honoured(options, capability), continuous)
    arguments.neuron_config.update(options.override_neuron_config or {})
    return arguments
