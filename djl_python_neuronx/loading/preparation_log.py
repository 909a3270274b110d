"""Log lines of a preparation: settings with their origins, problems, and the plan."""

from __future__ import annotations

import logging
from collections.abc import Collection

from djl_python_neuronx.config.findings import Problem, Problems
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.values import as_property
from djl_python_neuronx.loading.prepared import Prepared

logger = logging.getLogger(__name__)


def log_settings(resolved: Resolved, logged: Resolved | None = None) -> None:
    """Log the options and where they come from, except those already `logged`.

    In two steps, so that the log of a start that fails in between has the origins of its settings.
    """
    before = set() if logged is None else {(name, where) for name, _, where in logged.explain()}
    for option, value, origin in resolved.explain():
        if (option, origin) not in before:
            level = logging.DEBUG if origin == "default" else logging.INFO
            logger.log(
                level, "option name=%s value=%s origin=%r", option, as_property(value), origin
            )
    for option, reason in resolved.ignored.items() if logged is None else ():
        logger.info("option_ignored name=%s reason=%r", option, reason)


def log_problems(problems: Problems, logged: Collection[Problem] = ()) -> tuple[Problem, ...]:
    """Log warnings and notes, except those already `logged`; return all."""
    for problem in problems:
        if problem.level != "error" and problem not in logged:
            level = logging.WARNING if problem.level == "warning" else logging.INFO
            logger.log(level, "option_finding level=%s %s", problem.level, problem.message)
    return tuple(problems)


def log_preparation(prepared: Prepared, problems: Problems) -> None:
    """Log the settings, problems and plan of a model."""
    log_settings(prepared.resolved)
    log_problems(problems)
    log_plan(prepared)


def log_plan(prepared: Prepared) -> None:
    """Log what will be compiled and loaded, so that the log of a start that is killed later has the reason."""
    planned = prepared.planned
    logger.info(
        "planned backend=%s format=%s parameters=%s graphs=%d estimated_compile_s=%.0f needed_gib_per_core=%s",
        prepared.backend,
        prepared.artifact.format,
        prepared.case.model.num_parameters,
        len(planned.graphs),
        planned.estimated_compile_s,
        f"{planned.memory.needed / 2**30:.2f}" if planned.memory else "unknown",
    )
