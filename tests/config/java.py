"""An oracle of how DJL Serving's Java side reads a model folder, written from its source.

Source: djl-serving d21927c: dockerd-entrypoint-with-cuda-compat.sh, ConfigManager.java, ModelInfo.java
(loadServingProperties, configPerModelSettings, initialize, getLoadOnDevices), SageMakerCompatibility.java,
LmiConfigRecommender.java, PyModel.java, PyEnv.java, PyProcess.java, RollingBatch.java; djl af1d0b8: Model.java.
"""

import re
from dataclasses import dataclass

import javaproperties


class JavaError(Exception):
    """The model, or the server, does not start."""


@dataclass(frozen=True)
class Started:
    """The process that Java starts."""

    properties: dict[str, str]
    """The properties that the handler gets."""
    asynchronous: bool
    rolling: bool
    rows: int
    """Most rows of one call in a rolling batch."""
    collected: int
    """Most requests that are handed over as one, in every mode."""
    degree: int
    """Cores of each process; 0: Java was given none, and starts a process for each core."""
    predict_timeout_s: int
    loading_timeout_s: int

    @property
    def broken(self) -> bool:
        """Requests fail: several are handed over as one, or they are sent in one mode and answered in the other."""
        if self.asynchronous and self.rolling:
            return True
        return self.collected > 1 and (self.asynchronous or self.rolling)


def start(folder, environ=None, *, cores=0):
    """Start the model in `folder`, on a machine with so many NeuronCores."""
    environ = as_the_container_sets(environ or {})
    path = folder / "serving.properties"
    prop = javaproperties.loads(path.read_text("iso-8859-1")) if path.exists() else {}
    arguments = {
        new: environ[old]
        for old, new in {
            "SERVING_MAX_WORKERS": "maxWorkers",
            "SERVING_MIN_WORKERS": "minWorkers",
        }.items()
        if old in environ
    }
    load(environ, prop, arguments)
    recommend(prop, environ)
    collected = parse_int(environ.get("SERVING_BATCH_SIZE", "1"))
    for key in ("max_dynamic_batch_size", "batch_size"):
        collected = parse_int(prop.get(key, str(collected)))
    if "max_dynamic_batch_size" in prop:
        prop["batch_size"] = str(collected)
    for key in ("job_queue_size", "max_batch_delay", "max_idle_time", "required_memory_mb"):
        parse_int(prop.get(key, "0"))
    options = {
        key.removeprefix("option."): value for key, value in prop.items() if key[:7] == "option."
    }
    arguments.update({key: value for key, value in prop.items() if key[:7] != "option."})
    if parse_boolean(options.get("mpi_mode")) or prop.get("engine") == "MPI":
        raise JavaError("GPU devices are not enough")  # PyModel.java, without GPUs
    degree = options.get("tensor_parallel_degree", environ.get("TENSOR_PARALLEL_DEGREE", "0"))
    degree = cores if degree == "max" else parse_int(degree)
    parse_int(options.get("pipeline_parallel_degree", "1"))
    properties = {**arguments, **options}
    if degree > 0:
        properties["tensor_parallel_degree"] = str(degree)
    for key in ("minWorkers", "maxWorkers", "nc.minWorkers", "nc.maxWorkers"):
        parse_int(properties.get(key, "1"))
    parse_int(properties.get("retry_threshold") or "0")
    rolling = properties.get("rolling_batch", "disable") != "disable"
    rows = parse_int(properties.get("max_rolling_batch_size") or "32") if rolling else 0
    return Started(
        properties,
        asynchronous=parse_boolean(options.get("async_mode")),
        rolling=rolling,
        rows=rows,
        collected=collected,
        degree=degree,
        predict_timeout_s=seconds("predict_timeout", 120, options, environ),
        loading_timeout_s=seconds("model_loading_timeout", 240, options, environ),
    )


def as_djl_passes(folder, environ=None, *, cores=0, **added):
    """The properties of the handler's first call: those of `start`, and what Java's engine adds."""
    own = {"model_dir": str(folder), "device_id": "-1", "handler": "handle", "minWorkers": "1"}
    return {**start(folder, environ, cores=cores).properties, **own, **added}


def load(environ, prop, arguments):
    """Add the variables to the file's properties."""
    for variable, value in environ.items():
        prefix, _, name = variable.partition("_")
        if prefix not in {"OPTION", "ARGS"} or not value:
            continue
        name = name.lower() if re.fullmatch(r"[A-Z_\d]+", name) else name
        if prefix == "ARGS":
            arguments.setdefault(name, value)
        elif name == "engine":
            prop.setdefault("engine", value)
        else:
            name = "entryPoint" if name == "entrypoint" else name
            prop.setdefault(f"option.{name}", value)
    sagemaker = {
        "SAGEMAKER_NUM_MODEL_WORKERS": ("minWorkers", "maxWorkers"),
        "SAGEMAKER_STARTUP_TIMEOUT": ("option.model_loading_timeout",),
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": ("option.predict_timeout",),
    }
    for variable, keys in sagemaker.items():
        if variable in environ:
            prop.update(dict.fromkeys(keys, environ[variable]))


def as_the_container_sets(environ):
    """The variables that DJL Serving's container adds for users of TGI."""
    added = {
        "HF_MODEL_QUANTIZE": "OPTION_QUANTIZE",
        "HF_MODEL_TRUST_REMOTE_CODE": "OPTION_TRUST_REMOTE_CODE",
        "SM_NUM_GPUS": "TENSOR_PARALLEL_DEGREE",
        "MAX_BATCH_PREFILL_TOKENS": "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS",
        "MAX_BATCH_SIZE": "OPTION_MAX_ROLLING_BATCH_SIZE",
    }
    known = {new: environ[old] for old, new in added.items() if environ.get(old)}
    return {**known, **{name: value for name, value in environ.items() if value}}


def recommend(prop, environ):
    """LmiConfigRecommender, for a text model on a machine without GPUs."""
    features = environ.get("SERVING_FEATURES", "")
    rolling = prop.get("option.rolling_batch", "auto")
    if parse_int(prop.get("batch_size", "1")) > 1:
        rolling = "disable"
    elif rolling == "lmi-dist":
        rolling = "vllm"
    elif rolling == "auto":
        rolling = "disable"
        if "vllm" in features or "trtllm" in features:
            prop["option.async_mode"] = "true"
    prop["option.rolling_batch"] = rolling
    prop.setdefault("option.pipeline_parallel_degree", environ.get("PIPELINE_PARALLEL_DEGREE", "1"))
    degree = environ.get("TENSOR_PARALLEL_DEGREE", "max")
    if "option.tensor_parallel_degree" not in prop:
        parse_int(prop["option.pipeline_parallel_degree"])
        if degree != "max":
            prop["option.tensor_parallel_degree"] = degree
    prop.setdefault("option.max_rolling_batch_size", "256" if rolling == "vllm" else "32")


def seconds(name, default, options, environ):
    """PyModel, PyEnv.getDefaultTimeout: 0 and what is no number count as not set."""
    given = (options.get(name, ""), environ.get(name.upper(), ""))
    return next((int(text) for text in given if is_int(text) and int(text)), default)


def is_int(text):
    """True if Integer.parseInt takes the text."""
    return bool(re.fullmatch(r"[+-]?[0-9]+", text)) and -(2**31) <= int(text) < 2**31


def parse_int(text):
    """Integer.parseInt."""
    if not is_int(text):
        raise JavaError(text)
    return int(text)


def parse_boolean(text):
    """Boolean.parseBoolean."""
    return text is not None and text.lower() == "true"
