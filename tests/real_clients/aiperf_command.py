"""aiperf: a benchmark of each of the kinds of endpoints that it knows and the server has."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from asked import FIRST, MAX_TOKENS, MODEL, PROMPT, TOKENIZER, URL, show


def profile(text, kind, *arguments):
    """The events of an answer to a text, as the server sent them."""
    with TemporaryDirectory() as name:
        Path(name, "texts.jsonl").write_text(json.dumps({"text": text}) + "\n")
        command = ["aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind]
        command += ["--streaming", "--tokenizer", TOKENIZER, "--request-count", "1"]
        command += ["--input-file", f"{name}/texts.jsonl", "--custom-dataset-type", "single-turn"]
        command += ["--export-level", "raw", "--ui-type", "none", "--artifact-dir", name]
        subprocess.run([*command, *arguments], check=True, stdout=sys.stderr)
        (records,) = Path(name).rglob("profile_export_raw.jsonl")
        responses = json.loads(records.read_text())["responses"]
    values = [packet["value"] for response in responses for packet in response["packets"]]
    return [json.loads(value) for value in values if value != "[DONE]"]


settings = ["--extra-inputs", "temperature:0", f"max_tokens:{MAX_TOKENS}"]
usage = ["--use-server-token-count", "--per-chunk-usage"]
chat = profile(FIRST, "chat", *usage, *settings)
completion = profile(PROMPT, "completions", *settings)
length = ["--extra-inputs", json.dumps({"max_new_tokens": MAX_TOKENS})]
tokens = profile(PROMPT, "huggingface-generate", *length)
show(
    alone="".join(
        part["choices"][0]["delta"].get("content", "") for part in chat if part["choices"]
    ),
    prompt="".join(part["choices"][0]["text"] for part in completion if part["choices"]),
    prompt_generate="".join(part["token"]["text"] for part in tokens),
)
