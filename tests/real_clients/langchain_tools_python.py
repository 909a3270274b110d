"""LangChain's ChatOpenAI with a tool and with structured output."""

from asked import FRUIT, MODEL, SUM, URL, show
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Fruit(BaseModel):
    """A fruit."""

    name: str


chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=500)
bound = chat.bind_tools([add])
messages = [HumanMessage(SUM)]
first = bound.invoke(messages)
messages += [first, *[add.invoke(call) for call in first.tool_calls]]
whole = None
for part in bound.stream(messages[:1]):
    whole = part if whole is None else whole + part
assert [call["args"] for call in whole.tool_calls] == [call["args"] for call in first.tool_calls]
fruit = chat.with_structured_output(Fruit).invoke(FRUIT)
show(sum=bound.invoke(messages).text, fruit=fruit.name)
