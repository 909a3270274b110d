"""lm-eval's generate_until, through completions and through chats."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from asked import FIRST, MAX_TOKENS, MODEL, PROMPT, SYSTEM, TOKENIZER, URL, show

TASK = """
task: known
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: ""
generation_kwargs: {until: ["\\n"], max_gen_toks: %d}
metric_list: [{metric: exact_match}]
"""


def evaluate(question: str, *arguments: str) -> str:
    """The answer to a question, from the samples that lm-eval logs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        questions = folder / "questions.json"
        questions.write_text(json.dumps([{"question": question}]))
        (folder / "known.yaml").write_text(TASK % (questions, MAX_TOKENS))
        command = ["lm-eval", "run", "--include_path", name, "--tasks", "known", "--log_samples"]
        command += ["--output_path", str(folder / "out"), *arguments]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        return json.loads(samples.read_text())["resps"][0][0]


model = f"model={MODEL},base_url={URL}/v1"
# Of completions lm-eval sends token ids if it has the tokenizer.
tokenizer = f"tokenizer={TOKENIZER},add_bos_token=True"
completions = ["--model", "local-completions", "--model_args", f"{model}/completions,{tokenizer}"]
chats = ["--model", "local-chat-completions", "--model_args", f"{model}/chat/completions"]
show(
    prompt=evaluate(PROMPT, *completions),
    first=evaluate(FIRST, *chats, "--apply_chat_template", "--system_instruction", SYSTEM),
)
