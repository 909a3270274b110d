"""Options as a start has them: `examine` and `assess`, every problem of either raised at once."""

from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning import assess as planning
from djl_python_neuronx.planning.assess import examine
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.model import ModelFacts


def resolve(*arguments, **keywords):
    return _clean(*examine(*arguments, **keywords))


def assess(resolved, config, machine, backend):
    """The filled-in settings and the errors, of a model's `config.json` on a machine."""
    model = ModelFacts.from_config(config)
    done, _, problems = planning.assess(resolved, Case(resolved.options, model, machine, backend))
    return done, problems


def complete(*arguments):
    return _clean(*assess(*arguments))


def _clean(resolved, problems):
    if problems:
        raise ConfigError.collect(problems)
    return resolved
