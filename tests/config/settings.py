"""Options as a start has them: `examine` and `assess`, every problem of either raised at once."""

from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.assess import assess, examine


def resolve(*arguments, **keywords):
    return _clean(*examine(*arguments, **keywords))


def complete(*arguments, **keywords):
    return _clean(*assess(*arguments, **keywords))


def _clean(resolved, problems):
    if problems:
        raise ConfigError.collect(problems)
    return resolved
