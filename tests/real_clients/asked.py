"""The questions of every script; its arguments are the server's URL, the model's name and folder."""

import json
import sys
from pathlib import Path

URL, MODEL, TOKENIZER = sys.argv[1:]
QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
SYSTEM = QUESTIONS["system"]
FIRST = QUESTIONS["first"]
SECOND = QUESTIONS["second"]
PROMPT = QUESTIONS["prompt"]
MAX_TOKENS = QUESTIONS["max_tokens"]
SUM = QUESTIONS["sum"]
"""To be answered by `TOOL`."""
TOOL = QUESTIONS["tool"]
FRUIT = QUESTIONS["fruit"]
"""To be answered by an object with its `name`."""
OPENING = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]


def show(**texts: str) -> None:
    """Print the answers: `first`, `second`, `prompt` …, with a suffix for another way to get them."""
    sys.stdout.write(json.dumps(texts) + "\n")
