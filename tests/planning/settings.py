"""Options as a start has them: `examine` and `assess` with the errors beside, or with every error raised at once."""

from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.planning import assess as planning
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.model import ModelFacts


def examine(properties, model_dir, environ, *overrides, **keywords):
    """The settings and the errors."""
    problems = Problems()
    resolved = planning.examine(properties, model_dir, environ, problems, *overrides, **keywords)
    return resolved, list(problems.errors)


def assess(resolved, config, machine, backend):
    """The filled-in settings and the errors, of a model's `config.json` on a machine."""
    problems, model = Problems(), ModelFacts.from_config(config)
    case = Case(resolved.options, model, machine, backend)
    return planning.assess(resolved, case, problems)[0], list(problems.errors)


def resolve(properties, model_dir, environ, *overrides, **keywords):
    """The settings; raises the errors."""
    problems = Problems()
    resolved = planning.examine(properties, model_dir, environ, problems, *overrides, **keywords)
    problems.raise_errors()
    return resolved


def complete(resolved, config, machine, backend):
    """The filled-in settings; raises the errors."""
    problems, model = Problems(), ModelFacts.from_config(config)
    case = Case(resolved.options, model, machine, backend)
    done, _ = planning.assess(resolved, case, problems)
    problems.raise_errors()
    return done
