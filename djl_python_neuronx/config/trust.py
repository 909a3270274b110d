"""Variables of `option.env` in a model folder's own file: what they may change, and what is withheld for others.

The folder may be a stranger's. Its file may tune libraries and give credentials of its own. With any other variable in
it the operator's credentials are withheld, because the variable may decide where they go or which code reads them, and
variables that may load code do not reach the processes that this one starts. An operator's own `option.env` (command
line, `OPTION_ENV`) is not limited.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.sources import (
    FILE_NAME,
    OPTION_VARIABLES,
    Setting,
    with_worker_variables,
)
from djl_python_neuronx.config.values import join_words, shortened

TRUST = "DJL_NEURONX_TRUST_ENV"
"""Variable with the names that a folder's own file may set, separated by commas."""

NO_AWS_CREDENTIALS: Final[Mapping[str, str]] = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""Variables with which AWS's libraries find no credentials but those in other variables."""
NO_HUB_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN"  # noqa: S105  (a name)
"""Variable with which the Hub's library sends no token of a login."""
HUB_CACHE = "DJL_NEURONX_HUB_CACHE"
"""Variable with the cache for what a stranger's server may have sent, which nobody may take for the Hub's later."""

_HARMLESS = re.compile(
    r"(?!.*(ENDPOINT|MODULE|PLUGIN|PRELOAD|PROXY|WRAPPER|LIB(RAR|S|_|$)|PATHS?$|_FILES?$|_D?SO$))("
    r"(NEURON|CCOM|XLA|FI|OMP|KMP|MKL|OPENBLAS|MALLOC|TOKENIZERS|TRANSFORMERS|HF_HUB|HF_XET|OPTION|LC)_\w+"
    r"|HF_HOME|HUGGINGFACE_HUB_CACHE|XDG_CACHE_HOME|SERVING_DOWNLOAD_DIR|DJL_CACHE_DIR"
    r"|PJRT_DEVICE|LANG|TZ|LOG_LEVEL|RUST_LOG|PYTHON(UNBUFFERED|HASHSEED|IOENCODING|DONTWRITEBYTECODE)"
    r"|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|AWS_ACCESS_KEY_ID|AWS_SECRET_ACCESS_KEY|AWS_SESSION_TOKEN"
    r"|AWS_(DEFAULT_)?REGION|AWS_MAX_ATTEMPTS|AWS_RETRY_MODE)"
)
_DESTINATION = re.compile(
    r"HF_ENDPOINT|AWS_ENDPOINT_URL\w*|(?i:(http|https|all|no)_proxy)"
    r"|(AWS|REQUESTS|CURL)_CA_BUNDLE|SSL_CERT_(FILE|DIR)"
)
"""Names of servers and of their certificates: no code, and nothing secret once the credentials are withheld."""
_HUB_CREDENTIALS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"})
_AWS_SETTING = re.compile(
    r"AWS_((DEFAULT_)?REGION|MAX_ATTEMPTS|RETRY_MODE|ENDPOINT_URL\w*|CA_BUNDLE)"
)


def serving_environ(
    environ: Mapping[str, str],
    variables: Mapping[str, Setting],
    problems: Problems,
    *,
    inherited: bool,
    trusts_code: bool,
    cache_root: Path,
) -> dict[str, str]:
    """The variables of the process that serves, with those of `option.env`; warns of what is withheld.

    If the file names a server, a proxy or certificates for the Hub, downloads get a cache of their own (`HUB_CACHE`).

    Args:
        environ: the environment's variables.
        variables: those of `option.env`.
        problems: the collection for the warning.
        inherited: `environ` has `variables` already, because DJL Serving has set them.
        cache_root: the folder for such a cache.
        trusts_code: code in the model folder is trusted, and with it variables that may load code.
    """
    own = {name for name, setting in variables.items() if setting.source == FILE_NAME}
    said = "" if inherited and TRUST in own else environ.get(TRUST, "")
    trusted = {name.strip() for name in said.split(",")}
    doubtful = [
        name
        for name in sorted(own - trusted)
        if not is_harmless(name) and (not trusts_code or _is_remote(name))
    ]
    unset = dict.fromkeys(name for name in doubtful if not _DESTINATION.fullmatch(name))
    passed = {name: setting for name, setting in variables.items() if name not in unset}
    kept = {n: value for n, value in environ.items() if not (inherited and n in unset)}
    result = kept if inherited else with_worker_variables(environ, passed)
    if not doubtful:
        return result
    if servers := [n for n in doubtful if n in passed and n in result and not _is_aws(n)]:
        named = repr([(name, result[name]) for name in servers]).encode()
        result[HUB_CACHE] = str(cache_root / f"hub-{hashlib.sha256(named).hexdigest()[:16]}")
    # Java may read the file otherwise: a credential that stays has the file's own value.
    withheld = _withhold(result, doubtful, {n for n in passed if result.get(n) == passed[n].value})
    names = shortened(",".join(doubtful))
    problems.add(
        "warning",
        f"option.env ({variables[doubtful[0]].origin}) sets {names}: a model folder's own file decides neither where "
        f"the operator's credentials go nor which code is loaded. The {join_words(withheld, 'and')} of the "
        f"environment, of logins and of the machine are not used. "
        f"Not passed on: {shortened(join_words(unset)) or 'none'}. If you trust the file set {TRUST}={names} (names, "
        "separated by commas) in the environment; otherwise remove it from option.env",
    )
    return result


def is_harmless(name: str) -> bool:
    """True if a folder's own file may set the variable, whoever wrote it."""
    return name in OPTION_VARIABLES or _HARMLESS.fullmatch(name) is not None


def _withhold(environ: dict[str, str], doubtful: Sequence[str], own: Collection[str]) -> list[str]:
    """Take the credentials that `doubtful` variables may reach out of `environ`, but for the file's own; name them."""
    withheld = []
    if not all(map(_is_aws, doubtful)):
        withheld.append("tokens of the Hub")
        for name in _HUB_CREDENTIALS.difference(own):
            environ.pop(name, None)
        environ[NO_HUB_TOKEN] = "1"
    if not all(map(_is_hubs, doubtful)):
        withheld.append("credentials of AWS")
        for name in {name for name in environ if _is_aws(name)}.difference(own):
            if not _AWS_SETTING.fullmatch(name):
                del environ[name]
        environ |= NO_AWS_CREDENTIALS
    return withheld


def _is_hubs(name: str) -> bool:
    return name.startswith(("HF_", "HUGGING"))


def _is_aws(name: str) -> bool:
    return name.startswith("AWS_")


def _is_remote(name: str) -> bool:
    """True if credentials are all that a variable may reach."""
    return _is_hubs(name) or _is_aws(name) or _DESTINATION.fullmatch(name) is not None
