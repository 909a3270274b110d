"""dspy's LM, for chats and for completions."""

import dspy
from asked import MAX_TOKENS, MODEL, OPENING, PROMPT, SECOND, URL, show

settings = {
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
    "cache": False,
}
chat = dspy.LM(f"openai/{MODEL}", **settings)
(first,) = chat(messages=OPENING)
turns = [{"role": "assistant", "content": first}, {"role": "user", "content": SECOND}]
(second,) = chat(messages=OPENING + turns)
llm = dspy.LM(f"openai/{MODEL}", model_type="text", **settings)
(text,) = llm(PROMPT)
show(first=first, second=second, dspy=text)
