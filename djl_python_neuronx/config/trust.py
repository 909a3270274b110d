"""Variables of `option.env` in a model folder's own file: what they may set.

The folder may be a stranger's. Its file may tune libraries and give credentials of its own. A variable that chooses
what is asked, where files are written or read, or which code is loaded is not passed on. An operator's own `option.env`
(command line, `OPTION_ENV`) is not limited.
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
from djl_python_neuronx.config.values import shortened

TRUST = "DJL_NEURONX_TRUST_ENV"
"""Variable with the names that a folder's own file may set, separated by commas."""

_HARMLESS = re.compile(
    # Of names with these words the value is a server, a place of files, or code.
    r"(?!.*(ENDPOINT|PROXY|COMM_ID|CACHE$|DIR(S|ECTOR|_|$)|DUMP|OUTPUT|LOCATION|TRACE$|PATHS?$|_FILES?$"
    r"|MODULE|PLUGIN|PRELOAD|WRAPPER|OMP_TOOL|LIB(RAR|S|_|$)|_D?SO$))("
    r"(NEURON|CCOM|XLA|FI|OMP|KMP|MKL|OPENBLAS|MALLOC|TOKENIZERS|TRANSFORMERS|HF_HUB|OPTION|LC)_\w+"
    r"|HF_XET_(HIGH|NUM|CHUNK|SHARD|RECONSTRUCT)\w+"
    r"|PJRT_DEVICE|LANG|TZ|LOG_LEVEL|RUST_LOG|PYTHON(UNBUFFERED|HASHSEED|IOENCODING|DONTWRITEBYTECODE)"
    r"|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|AWS_ACCESS_KEY_ID|AWS_SECRET_ACCESS_KEY|AWS_SESSION_TOKEN"
    r"|AWS_(DEFAULT_)?REGION|AWS_MAX_ATTEMPTS|AWS_RETRY_MODE)"
)
_OF_DOWNLOADS = re.compile(
    r"(HF|HUGGING|TRANSFORMERS|AWS|XDG)\w*|SERVING_DOWNLOAD_DIR|DJL_CACHE_DIR"
    r"|(?i:(http|https|ftp|all|no)_proxy)|(REQUESTS|CURL)_CA_BUNDLE|SSL_CERT_(FILE|DIR)"
)
"""Names that decide what is downloaded from where to where, rather than which code is loaded."""


def serving_environ(
    environ: Mapping[str, str],
    variables: Mapping[str, Setting],
    problems: Problems,
    *,
    inherited: bool,
    trusts_code: bool,
) -> dict[str, str]:
    """The variables of the process that serves, with those of `option.env`; warns of what is not passed on.

    Args:
        environ: the environment's variables.
        variables: those of `option.env`.
        problems: the collection for the warning.
        inherited: `environ` has `variables` already, because DJL Serving has set them. What is not passed on is then
            removed, and of downloads from this process too, whose libraries read it.
        trusts_code: code in the model folder is trusted, and with it variables that may load code.
    """
    own = {name for name, setting in variables.items() if setting.source == FILE_NAME}
    said = "" if inherited and TRUST in own else environ.get(TRUST, "")
    trusted = {name.strip() for name in said.split(",")}
    doubtful = [
        name
        for name in sorted(own - trusted)
        if not is_harmless(name) and (not trusts_code or _OF_DOWNLOADS.fullmatch(name))
    ]
    if doubtful:
        names = shortened(",".join(doubtful))
        problems.add(
            "warning",
            f"option.env ({variables[doubtful[0]].origin}) sets {names}, not passed on: a model folder's own file "
            "decides neither which servers are asked, nor where files are written or read, nor which code is loaded. "
            f"If you trust the file set {TRUST}={names} (names, separated by commas) in the environment; otherwise "
            "remove it from option.env",
        )
    if not inherited:
        passed = {name: one for name, one in variables.items() if name not in doubtful}
        return with_worker_variables(environ, passed)
    for name in filter(_OF_DOWNLOADS.fullmatch, doubtful):
        taken(name)
    return {name: value for name, value in environ.items() if name not in doubtful}


def is_harmless(name: str) -> bool:
    """True if a folder's own file may set the variable, whoever wrote it."""
    return name in OPTION_VARIABLES or _HARMLESS.fullmatch(name) is not None
