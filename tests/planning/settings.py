"""Options as a start has them: `examine` and `assess`, every problem of either raised at once."""

from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning import assess as planning
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning import plan as serving_plan
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


def library_arguments(options, backend, *, model_type=None, continuous=None, **stored):
    """The arguments of a backend's library; `model_type` None: of an architecture that is not known."""
    if continuous is not None:
        strategy = "continuous_batching" if continuous else "naive_rolling_batch"
        options = options.model_copy(update={"rolling_batch_strategy": strategy})
    model = ModelFacts.from_config({"model_type": model_type} if model_type else {})
    case = Case(options, model, machines.named("trn1.32xlarge"), backend, **stored)
    return serving_plan.library_arguments(case)


def complete(*arguments):
    return _clean(*assess(*arguments))


def _clean(resolved, problems):
    if problems:
        raise ConfigError.collect(problems)
    return resolved
