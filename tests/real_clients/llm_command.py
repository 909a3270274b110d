"""The command `llm`, whose second question continues the conversation of the first."""

import subprocess
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory

from asked import FIRST, MAX_TOKENS, MODEL, PROMPT, SECOND, SYSTEM, URL, show

MODELS = f"""
- {{model_id: chat, model_name: {MODEL}, api_base: "{URL}/v1"}}
- {{model_id: text, model_name: {MODEL}, api_base: "{URL}/v1", completion: true}}
"""

with TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(MODELS)

    def ask(*arguments: str) -> str:
        settings = ["-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS)]
        return subprocess.run(
            ["llm", "prompt", *arguments, *settings],
            env={**environ, "LLM_USER_PATH": folder},
            stdout=subprocess.PIPE,
            check=True,
            encoding="utf-8",
        ).stdout.removesuffix("\n")

    show(
        first=ask("-m", "chat", "-s", SYSTEM, FIRST),
        second=ask("-c", SECOND),
        first_whole=ask("-m", "chat", "-s", SYSTEM, "--no-stream", FIRST),
        prompt=ask("-m", "text", PROMPT),
    )
