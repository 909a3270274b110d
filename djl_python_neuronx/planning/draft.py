"""Options of a draft model."""

from djl_python_neuronx.planning.defaults import DRAFT_ORIGIN as ORIGIN
from djl_python_neuronx.planning.defaults import as_draft_model as alone
from djl_python_neuronx.planning.defaults import draft_lengths, draft_settings

__all__ = ["ORIGIN", "alone", "draft_lengths", "draft_settings"]
