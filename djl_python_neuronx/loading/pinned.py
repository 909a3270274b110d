"""The settings that an output of a compile keeps, as options and keys, and those that it leaves out."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from pathlib import Path

from djl_python_neuronx.artifacts.store import CACHE_DIR_FLAG
from djl_python_neuronx.config import own_code
from djl_python_neuronx.config.options import names_where, option
from djl_python_neuronx.config.trust import doubt
from djl_python_neuronx.errors import ArtifactError
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.plan import graph_options

logger = logging.getLogger(__name__)

_HANDOVER = names_where(lambda marker: marker.djl.overrules)
"""How DJL Serving hands over requests: it may overrule these options."""
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_OF_MACHINE = {"NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"}.union(
    *(option(name).env for name in names_where(lambda marker: marker.output == "local"))
)


def pinned(prepared: Prepared) -> dict[str, object]:
    """Options to pin in an output: those that are set and those that followed from model and machine.

    Also the backend, and how DJL Serving hands over requests, because recent versions choose the slow way.
    """
    options, origins = prepared.options, prepared.resolved.origins
    values = options.model_dump(mode="json")
    names = {*origins, *graph_options(options, prepared.backend)} & {*values} - {"model_dir"}
    found = {name: _text(values[name]) for name in sorted(names) if values[name] is not None}
    found["model_loader"] = prepared.backend
    if _HANDOVER.isdisjoint(origins):
        found["async_mode"] = True
    if found.get("async_mode") is True:
        found.pop("batch_size", None)  # without effect: DJL Serving hands over requests one by one
    return found


def for_djl(prepared: Prepared) -> dict[str, str]:
    """The keys that only DJL Serving reads; of `option.env` what is harmless, not secret and no place."""
    found, left_out, variables = dict(prepared.resolved.for_djl), [], []
    options = prepared.options
    found.pop("max_dynamic_batch_size", None)
    if options.batch_size > 1 and options.rolling_batch == "disable" and not options.async_mode:
        found["batch_size"] = str(options.batch_size)
    for name, setting in prepared.resolved.worker_variables.items():
        value = CACHE_DIR_FLAG.sub("", str(setting.value)).strip()
        is_local = name in _OF_MACHINE or prepared.environ.get(name) != setting.value
        if is_local or _SECRET.search(name) or doubt(name, value) is not None:
            left_out.append(name)
        else:
            variables.append(f"{name}={value}")
    if left_out:
        logger.warning(
            "option_env_left_out names=%s reason='an output gets no secrets, nothing that only this machine has, and "
            "nothing that a model folder may not set; set them where it is served'",
            ",".join(left_out),
        )
    return {**found, "option.env": ",".join(variables)} if variables else found


def _text(value: object) -> object:
    """Write some lists as JSON: commas can neither nest nor tell a list of one number from the number."""
    is_json = isinstance(value, list) and (
        len(value) == 1 or any(isinstance(entry, (list, dict)) for entry in value)
    )
    return json.dumps(value) if is_json else value


def log_left_out(prepared: Prepared, source: Path) -> None:
    """Warn of formatters that an output of the model in `source` lacks."""
    own = prepared.options.model_dir or source
    with suppress(OSError, ArtifactError):
        if own.resolve() != source.resolve() and own_code.formatters(own):
            reason = "it lies beside the settings, not in the model: copy it, and what it imports"
            logger.warning("formatters_left_out file=%s reason='%s'", own / "model.py", reason)
