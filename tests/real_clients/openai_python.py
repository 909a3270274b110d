"""OpenAI's client for Python."""

from asked import MAX_TOKENS, MODEL, OPENING, PROMPT, SECOND, URL, show
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
settings = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
messages = list(OPENING)
first = client.chat.completions.create(messages=messages, **settings)
messages.append(first.choices[0].message)
messages.append({"role": "user", "content": SECOND})
second = client.chat.completions.create(messages=messages, **settings)
with client.chat.completions.stream(
    messages=messages, stream_options={"include_usage": True}, **settings
) as stream:
    final = stream.get_final_completion()
parsed = client.chat.completions.parse(messages=messages, **settings)
asked = {
    "model": MODEL,
    "temperature": 0,
    "max_output_tokens": MAX_TOKENS,
    "input": [
        *OPENING,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": SECOND},
    ],
}
response = client.responses.create(**asked)
with client.responses.stream(**asked) as events:
    last = events.get_final_response()
whole = client.completions.create(prompt=PROMPT, **settings)
parts = client.completions.create(prompt=PROMPT, stream=True, **settings)
show(
    first=first.choices[0].message.content,
    second=second.choices[0].message.content,
    second_stream=final.choices[0].message.content,
    second_parse=parsed.choices[0].message.content,
    second_response=response.output_text,
    second_response_stream=last.output_text,
    prompt=whole.choices[0].text,
    prompt_stream="".join(part.choices[0].text for part in parts),
)
