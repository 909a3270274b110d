"""What a backend can get wrong, in our own words."""

from __future__ import annotations

from djl_python_neuronx.errors import BackendError, StepError

MAX_FAILED_STEPS = 3
"""Device calls that may fail one after another before a model is given up: a device that is gone fails every
call, and every request sent to it would be lost one by one."""


def require_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse an answer of another shape than the step asked for.

    Raises:
        StepError: they differ, or there is no second axis.
    """
    if found != expected or len(found) == 1:
        msg = f"the backend answered with shape {found}, expected {expected}; this is a bug of the backend"
        raise StepError(msg)


def translate(error: Exception) -> BackendError:
    """A backend's own error as it is, any other as a StepError: a new one each time, so that no row shares one."""
    if isinstance(error, BackendError):
        return error
    step_error = StepError(
        f"the device call failed ({type(error).__name__}: {error}); this request is lost, retry it"
    )
    step_error.__cause__ = error
    return step_error
