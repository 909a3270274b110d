"""Anthropic's client for Python."""

from anthropic import Anthropic
from asked import FIRST, MAX_TOKENS, MODEL, SECOND, SYSTEM, URL, show

client = Anthropic(base_url=URL, api_key="none")
asked = {"model": MODEL, "system": SYSTEM}
greedy = {"temperature": 0}  # no parameter of the client's since 2.0
settings = {**asked, "max_tokens": MAX_TOKENS, "extra_body": greedy}
messages = [{"role": "user", "content": FIRST}]
first = client.messages.create(messages=messages, **settings)
count = client.messages.count_tokens(messages=messages, **asked)
assert count.input_tokens == first.usage.input_tokens + first.usage.cache_read_input_tokens
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": SECOND}]
second = client.messages.create(messages=messages, **settings)
with client.messages.stream(messages=messages, **settings) as stream:
    texts = list(stream.text_stream)
    final = stream.get_final_message()
assert final.stop_reason == second.stop_reason
assert final.usage.output_tokens == second.usage.output_tokens
alone = client.beta.messages.create(
    model=MODEL, max_tokens=MAX_TOKENS, betas=["a"], messages=messages[:1], extra_body=greedy
)
show(
    first=first.content[0].text,
    second=second.content[0].text,
    second_stream=final.content[0].text,
    second_texts="".join(texts),
    alone=alone.content[0].text,
)
