"""litellm, by both of its providers for servers such as this one, with the message object of the first answer."""

import litellm
from asked import MAX_TOKENS, MODEL, OPENING, PROMPT, SECOND, URL, show

texts = {}
for provider in ("openai", "hosted_vllm"):
    settings = {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{URL}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    messages = list(OPENING)
    first = litellm.completion(messages=messages, **settings)
    messages.append(first.choices[0].message)
    messages.append({"role": "user", "content": SECOND})
    second = litellm.completion(messages=messages, **settings)
    chunks = list(litellm.completion(messages=messages, stream=True, **settings))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=messages)
    texts[f"first_{provider}"] = first.choices[0].message.content
    texts[f"second_{provider}"] = second.choices[0].message.content
    texts[f"second_stream_{provider}"] = rebuilt.choices[0].message.content
completion = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    prompt=PROMPT,
    api_base=f"{URL}/v1",
    api_key="none",
    temperature=0,
    max_tokens=MAX_TOKENS,
)
show(prompt=completion.choices[0].text, **texts)
