"""guidellm: a benchmark of each of its formats, with the settings that it always sends."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from asked import FIRST, MAX_TOKENS, MODEL, PROMPT, TOKENIZER, URL, show


def benchmark(route, row):
    """The text of both answers to a row of data; a row with `output_tokens_count` is sent with `ignore_eos`."""
    backend = {"kind": "openai_http", "target": URL, "model": MODEL, "request_format": route}
    backend |= {"extras": {"body": {"temperature": 0}}}
    with TemporaryDirectory() as name:
        data, report = Path(name, "data.jsonl"), Path(name, "report.json")
        data.write_text(f"{json.dumps(row)}\n" * 2)
        command = ["guidellm", "run", "--backend", json.dumps(backend)]
        command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        command += ["--data", f"kind=json_file,path={data}", "--disable-console-interactive"]
        command += ["--output", f"kind=json,path={report}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    (text,) = {request["output"] for request in requests["successful"]}
    return text


prompt = {"prompt": PROMPT, "output_tokens_count": MAX_TOKENS}
show(
    alone=benchmark("/v1/chat/completions", {"prompt": FIRST}),
    prompt=benchmark("/v1/completions", prompt),
)
