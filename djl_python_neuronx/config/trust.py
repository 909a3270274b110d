"""Variables of `option.env` in a model folder's own file: what they may set.

The folder may be a stranger's. Its file may tune libraries and give its own credentials. A variable whose name or
value chooses a server, a place of files or code is not passed on. An operator's `option.env` (command line,
`OPTION_ENV`) is not limited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.sources import (
    FILE_NAME,
    OPTION_VARIABLES,
    Setting,
    taken,
    with_worker_variables,
)
from djl_python_neuronx.config.values import MAX_NAMES, PLACE, listed, shortened

TRUST = "DJL_NEURONX_TRUST_ENV"
"""Variable with the names that a folder's own file may set, separated by commas."""

_HARMLESS = re.compile(
    # Of names with these words the value is a server, a place of files, arguments that may name one, or code.
    r"(?!.*(ENDPOINT|PROXY|COMM_ID|URL|CACHE$|DIR(S|ECTOR|_|$)|DUMP|OUTPUT|LOCATION|TRACE$|PROFILE|PATHS?$|_FILES?$"
    r"|FLAGS$|ARGS$|CONF$|MODULE|PLUGIN|PRELOAD|WRAPPER|OMP_TOOL|LIB(RAR|S|_|$)|_D?SO$))("
    r"(NEURON|CCOM|XLA|FI|OMP|KMP|MKL|OPENBLAS|MALLOC|TOKENIZERS|TRANSFORMERS|HF_HUB|LC)_\w+"
    r"|HF_XET_(HIGH|NUM|CHUNK|SHARD|RECONSTRUCT)\w+"
    r"|PJRT_DEVICE|LANG|TZ|LOG_LEVEL|RUST_LOG|PYTHON(UNBUFFERED|HASHSEED|IOENCODING|DONTWRITEBYTECODE)"
    r"|AWS_(DEFAULT_)?REGION|AWS_MAX_ATTEMPTS|AWS_RETRY_MODE)"
)
_ANY_VALUE = OPTION_VARIABLES.keys() | {
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
}
"""Options, which are judged as such, and credentials, which only open what belongs to them."""
_COMPILER_FLAGS = "NEURON_CC_FLAGS"
# Source: the Neuron compiler's guide; neuronx-distributed-inference 0.9, models/model_wrapper.py; libneuronxla. Of the
# flags that are not here some name files (--cache_dir, --logfile, --output, --dump-on-error, --artifacts-dir).
_FLAG = re.compile(
    r"-O[0-3]|\w[\w.-]*"
    r"|--(optlevel|model-type|target|framework|lnc|logical-nc-config|verbose|distribution-strategy|execute-repetition"
    r"|auto-cast|auto-cast-type|(enable|disable)-mixed-precision-accumulation|enable-saturate-infinity"
    r"|enable-fast-(context-switch|loading-neuron-binaries)|enable-experimental-O1|retry_failed_compilation|no-cache"
    r"|hbm-scratchpad-page-size|internal-(hlo2tensorizer|backend)-options|tensorizer-options"
    r"|internal-enable-dge-levels|internal-disable-fma-on-ios|internal-bir-enable-sb-allocation"
    r"|verify-hlo|modular-flow-mac-threshold|recursive-layer-det|fuse-dot-logistic"
    r"|experimental-unsafe-fp8e4m3fn-as-fp8e4m3|enable-ccop-compute-overlap|cc-pipeline-tiling-factor"
    r"|vectorize-strided-dma|enable-verifier|enable-output-completion-notifications)"
)
"""A word of `NEURON_CC_FLAGS`, without quotes, that names no file: a flag, also one inside of another, or a value."""


def serving_environ(
    environ: Mapping[str, str],
    variables: Mapping[str, Setting],
    problems: Problems,
    *,
    inherited: bool,
) -> dict[str, str]:
    """The variables of the process that serves, with those of `option.env`; warns of what is not passed on.

    Args:
        environ: the environment's variables.
        variables: those of `option.env`.
        problems: the collection for the warning.
        inherited: `environ` has `variables` already, because DJL Serving has set them. A variable that is not passed on
            is then removed, from this process too, whose libraries read it.
    """
    own = {name for name, setting in variables.items() if setting.source == FILE_NAME}
    said = "" if inherited and TRUST in own else environ.get(TRUST, "")
    trusted = {name.strip() for name in said.split(",")}
    doubts = {name: doubt(name, str(variables[name].value)) for name in sorted(own - trusted)}
    doubtful = {name: part for name, part in doubts.items() if part is not None}
    if doubtful:
        parts = listed(f"{name} ({part})" if part else name for name, part in doubtful.items())
        names = ",".join(str(shortened(name)) for name in [*doubtful][:MAX_NAMES])
        problems.add(
            "warning",
            f"option.env ({variables[min(doubtful)].origin}) sets {parts}, not passed on: a "
            "model folder's own file decides neither which servers are asked, nor where files are written or read, nor "
            f"which code is loaded. If you trust the file set {TRUST}={names} (names, "
            "separated by commas) in the environment; otherwise remove it from option.env",
        )
    if not inherited:
        passed = {name: one for name, one in variables.items() if name not in doubtful}
        return with_worker_variables(environ, passed)
    for name in doubtful:
        taken(name)
    return {name: value for name, value in environ.items() if name not in doubtful}


def doubt(name: str, value: str) -> str | None:
    """The part of a variable's value that a folder's own file may not set; None if it may set any value.

    Only a compiler's flag is quoted from the value. Empty if the file may not set the variable at all.
    """
    if name in _ANY_VALUE:
        return None
    if name == _COMPILER_FLAGS:
        words = re.findall(r"[^\s='\"]+", value)
        other = next((word for word in words if not _FLAG.fullmatch(word)), None)
        return other if other is None or other.startswith("-") else "its value"
    if not _HARMLESS.fullmatch(name):
        return ""
    return "a place" if PLACE.search(value) else None
