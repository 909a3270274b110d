"""TGI's client for Python."""

from asked import MAX_TOKENS, OPENING, PROMPT, SECOND, URL, show
from text_generation import Client

client = Client(URL, timeout=60)
settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
messages = list(OPENING)
first = client.chat(messages, **settings)
messages += [first.choices[0].message, {"role": "user", "content": SECOND}]
second = client.chat(messages, **settings)
tokens = client.generate_stream(PROMPT, max_new_tokens=MAX_TOKENS)
show(
    first=first.choices[0].message.content,
    second=second.choices[0].message.content,
    prompt=client.generate(PROMPT, max_new_tokens=MAX_TOKENS).generated_text,
    prompt_stream="".join(part.token.text for part in tokens if not part.token.special),
)
