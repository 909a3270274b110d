"""huggingface_hub's InferenceClient."""

from asked import MAX_TOKENS, OPENING, PROMPT, SECOND, URL, show
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=URL)
settings = {"temperature": 0, "max_tokens": MAX_TOKENS}
messages = list(OPENING)
first = client.chat_completion(messages, **settings)
messages += [first.choices[0].message, {"role": "user", "content": SECOND}]
second = client.chat_completion(messages, **settings)
parts = client.chat.completions.create(messages=messages, stream=True, **settings)
show(
    first=first.choices[0].message.content,
    second=second.choices[0].message.content,
    second_stream="".join(part.choices[0].delta.content or "" for part in parts),
    prompt=client.text_generation(PROMPT, max_new_tokens=MAX_TOKENS),
    prompt_details=client.text_generation(
        PROMPT, max_new_tokens=MAX_TOKENS, details=True
    ).generated_text,
    prompt_stream="".join(client.text_generation(PROMPT, max_new_tokens=MAX_TOKENS, stream=True)),
)
