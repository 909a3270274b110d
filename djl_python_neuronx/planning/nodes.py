"""A model on several machines: what the variables say of it, and why it is not served.

Source: transformers-neuronx 0.13, config.py (`NeuronConfig` reads the variables), decoder.py, base.py `pp_forward`.
"""

from __future__ import annotations

from collections.abc import Mapping

LOCAL_TP = "NEURON_LOCAL_TP"
RANK_ID = "NEURON_RANK_ID"
PP_STAGES = "NEURON_PP_STAGES"


def local_degree(environ: Mapping[str, str]) -> int | None:
    """`NEURON_LOCAL_TP`: cores that each machine gives to a tensor parallel group; None: not set, or no number."""
    text = environ.get(LOCAL_TP, "").strip()
    return int(text) or None if text.isdecimal() and len(text) < 6 else None


def spanning(degree: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables, with their values, by which a model of this tensor parallel degree lies on several machines."""
    single = {LOCAL_TP: degree, RANK_ID: 0, PP_STAGES: 1}
    return tuple(
        f"{name}={environ[name]}"
        for name, expected in single.items()
        if environ.get(name, "").strip() not in {"", str(expected)}
    )


def obstacle(degree: int, environ: Mapping[str, str]) -> str | None:
    """Why a process with these variables cannot serve a model of this tensor parallel degree; None: it can.

    The machines of a group wait for each other in every step, so each of them has to make the same calls at the same
    time, and those follow from requests that only the first one gets.
    """
    found = spanning(degree, environ)
    if not found:
        return None
    return (
        f"{' and '.join(found)}, with tensor_parallel_degree={degree}, is a part of a model on several machines, which "
        f"is not served here: nothing tells the other machines what to run. Expected {LOCAL_TP} to be the degree, "
        f"{RANK_ID} 0 and {PP_STAGES} 1, or none of them; unset them, and take a machine that holds the model"
    )
