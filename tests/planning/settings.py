"""Options as a start has them: `examine` and `assess` with the errors beside, or with every error raised at once."""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning import plan as planning
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.model import ModelFacts

PLANS = TypeAdapter(LoadPlan)
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
"""A small `config.json`."""


@dataclass(frozen=True)
class Settings(Resolved):
    """Settings with the problems found while they were read and assessed."""

    problems: Problems = field(default_factory=Problems, compare=False)


def examine(*arguments, **keywords):
    """The settings and the errors."""
    settings = _examine(*arguments, **keywords)
    return settings, list(settings.problems.errors)


def assess(resolved, config, machine, backend):
    """The filled-in settings and the errors, of a model's `config.json` on a machine."""
    done = _assess(resolved, config, machine, backend)
    return done, list(done.problems.errors)


def library_arguments(options, backend, *, model_type=None, continuous=None, **stored):
    """The arguments of a backend's library; `model_type` None: of an architecture that is not known."""
    if continuous is not None:
        strategy = "continuous_batching" if continuous else "naive_rolling_batch"
        options = options.model_copy(update={"rolling_batch_strategy": strategy})
    model = ModelFacts.from_config({"model_type": model_type} if model_type else {})
    case = Case(
        options, model, machines.named("trn1.32xlarge"), NEURON_BACKENDS.get(backend), **stored
    )
    found = planning.library_arguments(case)
    plan = LoadPlan(Path("model"), 1, 1, (1,), arguments=found)
    assert PLANS.validate_json(PLANS.dump_json(plan)) == plan
    return found


def resolve(*arguments, **keywords):
    """The settings; raises the errors."""
    settings = _examine(*arguments, **keywords)
    settings.problems.raise_errors()
    return settings


def complete(resolved, config, machine, backend):
    """The filled-in settings; raises the errors."""
    done = _assess(resolved, config, machine, backend)
    done.problems.raise_errors()
    return done


def _examine(properties, model_dir, environ, *overrides, **keywords):
    problems = Problems()
    resolved = planning.examine(properties, model_dir, environ, problems, *overrides, **keywords)
    return Settings(**vars(resolved), problems=problems)


def _assess(resolved, config, machine, backend):
    problems = Problems()
    for problem in resolved.problems:
        if problem.level != "error":
            problems.add(problem.level, problem.message, problem.options)
    case = Case(
        resolved.options, ModelFacts.from_config(config), machine, NEURON_BACKENDS.get(backend)
    )
    done, _ = planning.assess(resolved, case, problems)
    return Settings(**{**vars(done), "problems": problems})
