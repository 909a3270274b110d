"""Loads the tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.adapters import FastTokenizer, PythonTokenizer
from djl_python_neuronx.artifacts.formats import read_json
from djl_python_neuronx.artifacts.vocabulary import has_vocabulary, no_tokenizer
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.types import Tokenizer


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, revision: str | None = None
) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ArtifactNotFoundError: the folder has no tokenizer.
        ArtifactAccessError: its files cannot be read.
        ArtifactError: the tokenizer cannot be loaded from them.
    """
    try:
        library = _load(folder, trust_remote_code=trust_remote_code, revision=revision)
        return (
            FastTokenizer(library)
            if getattr(library, "is_fast", False)
            else PythonTokenizer(library)
        )
    except ArtifactError:
        raise
    except PermissionError as error:
        msg = f"the tokenizer in {folder} cannot be read: {error.strerror}. Give this user access."
        raise ArtifactAccessError(msg) from error
    except Exception as error:
        # The library's errors are of every type, and its pure Python classes run the model author's code.
        msg = (
            f"the tokenizer in {folder} cannot be loaded ({type(error).__name__}: {error}). Check that its files are "
            "complete; a tokenizer with code of its own needs option.trust_remote_code=true."
        )
        raise ArtifactError(msg) from error


def _load(folder: Path, *, trust_remote_code: bool, revision: str | None) -> Any:  # noqa: ANN401
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    # Looked for here because transformers 5 makes an empty tokenizer of nothing. Code of the model's own may need none.
    if not trust_remote_code and not has_vocabulary(names):
        msg = f"{no_tokenizer(folder)}."
        raise ArtifactNotFoundError(msg)

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in names else {}
    # transformers 5 saves the class name TokenizersBackend, which 4.x does not know; both mean tokenizer.json as it is.
    plain = config.get("tokenizer_class") in {"TokenizersBackend", "PreTrainedTokenizerFast"}
    source = PreTrainedTokenizerFast if plain and "tokenizer.json" in names else AutoTokenizer
    library = source.from_pretrained(
        folder, trust_remote_code=trust_remote_code, revision=revision or "main"
    )
    # Newer versions save the template in a file of its own, which 4.45 does not read.
    if library.chat_template is None and "chat_template.jinja" in names:
        library.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return library
