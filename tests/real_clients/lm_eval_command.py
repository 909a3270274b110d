"""lm-eval through completions and chats: texts, and figures of a task that are those of its own `--model hf`."""

import json
import math
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asked import FIRST, MAX_TOKENS, MODEL, PROMPT, SYSTEM, TOKENIZER, URL, show

GENERATE = """
task: known
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: %d}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
LINES = [
    {
        "question": f"{a} + {b} =",
        "answer": f" {a + b}",
        "choices": [f" {a + b}", f" {a + b + 1}", f" {b}", " a b"],
    }
    for a, b in ((4, 6), (1, 2), (8, 5), (3, 3), (7, 9), (2, 8), (6, 1), (5, 5), (9, 4), (0, 7))
]
model = f"model={MODEL},base_url={URL}/v1"
# Of completions lm-eval sends token ids if it has the tokenizer.
tokenizer = f"tokenizer={TOKENIZER},add_bos_token=True"
COMPLETIONS = ["--model", "local-completions", "--model_args", f"{model}/completions,{tokenizer}"]
CHATS = ["--model", "local-chat-completions", "--model_args", f"{model}/chat/completions"]
ITSELF = [
    "--model",
    "hf",
    "--model_args",
    f"pretrained={TOKENIZER},dtype=float32,add_bos_token=True",
]
ITSELF += ["--device", "cpu"]


def evaluate(tasks: str, lines: list[dict[str, Any]], *arguments: str) -> Any:
    """For each task the answers to each line, and the figures, from what lm-eval logs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        questions = folder / "questions.json"
        questions.write_text(json.dumps(lines))
        (folder / "known.yaml").write_text(GENERATE % (questions, MAX_TOKENS))
        (folder / "choices.yaml").write_text(CHOOSE % questions)
        command = ["lm-eval", "run", "--include_path", name, "--tasks", tasks, "--log_samples"]
        command += ["--output_path", str(folder / "out"), *arguments]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (results,) = (folder / "out").rglob("results_*.json")
        found = {}
        for task, figures in json.loads(results.read_text())["results"].items():
            (samples,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
            logged = [json.loads(line) for line in samples.read_text().splitlines()]
            answers = [one["resps"] for one in sorted(logged, key=lambda one: one["doc_id"])]
            found[task] = answers, {key: figures[key] for key in figures if "," in key}
        return found


QUESTION = {"question": PROMPT, "answer": "", "choices": [" a", " b"]}
served, own = (evaluate("choices,known", [*LINES, QUESTION], *way) for way in (COMPLETIONS, ITSELF))
assert served["known"] == own["known"]
(scores, figures), (own_scores, own_figures) = served["choices"], own["choices"]
assert figures == own_figures, (figures, own_figures)
pairs = [
    (float(a[0][0]), float(b[0][0]), str(a[0][1]) == str(b[0][1]))
    for line, own_line in zip(scores, own_scores, strict=True)
    for a, b in zip(line, own_line, strict=True)
]
assert len(pairs) == 4 * len(LINES) + 2
wrong = [pair for pair in pairs if not (math.isclose(pair[0], pair[1], abs_tol=1e-3) and pair[2])]
assert not wrong, wrong
first = evaluate(
    "known",
    [{**QUESTION, "question": FIRST}],
    *CHATS,
    "--apply_chat_template",
    "--system_instruction",
    SYSTEM,
)
show(prompt=served["known"][0][-1][0][0], first=first["known"][0][0][0][0])
