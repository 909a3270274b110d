"""Backends that cannot load yet."""

from djl_python_neuronx.planning.case import NEURON_BACKENDS

NOT_SERVED = frozenset(name for name, facts in NEURON_BACKENDS.items() if not facts.served)
