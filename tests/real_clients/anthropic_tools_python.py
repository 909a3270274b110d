"""Anthropic's client for Python: a tool by hand, streamed, and its runner of tools."""

from anthropic import Anthropic, beta_tool
from asked import MODEL, SUM, TOOL, URL, show

client = Anthropic(base_url=URL, api_key="none")
tools = [{"name": TOOL["name"], "description": "Adds.", "input_schema": TOOL["parameters"]}]
settings = {"model": MODEL, "max_tokens": 500, "tools": tools}
messages = [{"role": "user", "content": SUM}]
first = client.messages.create(messages=messages, **settings)
assert first.stop_reason == "tool_use"
(call,) = [block for block in first.content if block.type == "tool_use"]
with client.messages.stream(messages=messages, **settings) as stream:
    assert stream.get_final_message().content[-1].input == call.input
result = {"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input.values()))}
messages += [
    {"role": "assistant", "content": first.content},
    {"role": "user", "content": [result]},
]
last = client.messages.create(messages=messages, **settings)


@beta_tool
def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


runner = client.beta.messages.tool_runner(
    model=MODEL, max_tokens=500, tools=[add], messages=[{"role": "user", "content": SUM}]
)
show(sum=last.content[0].text, sum_runner=runner.until_done().content[0].text)
