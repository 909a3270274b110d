"""Properties with which a client tries to set what options, parameters and DJL Serving itself set."""

from __future__ import annotations

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.sampling import SamplingParams

_NAMES = {*ServingOptions.model_fields, *SamplingParams.WIRE_NAMES, "stream", "max_new_tokens"}
PROPERTIES = {
    **dict.fromkeys(_NAMES, "1"),
    **{f"option.{name}": "1" for name in ServingOptions.model_fields},
    "batch_size": "7",
    "batch_000.data": "x",
    "device_id": "1",
    "input_formatter": "handle",
    "model_dir": "/nowhere",
    "model_id": "s3://clients/model",
    "output_formatter": "sse",
    "reset_rollingbatch": "true",
    "save_mp_checkpoint_path": "/nowhere/out",
    "seed": "1",
}
