"""LangChain's ChatOpenAI and OpenAI."""

from asked import FIRST, MAX_TOKENS, MODEL, PROMPT, SECOND, SYSTEM, URL, show
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

settings = {
    "model": MODEL,
    "base_url": f"{URL}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
}
chat = ChatOpenAI(**settings)
messages = [SystemMessage(SYSTEM), HumanMessage(FIRST)]
first = chat.invoke(messages)
messages += [first, HumanMessage(SECOND)]
second = chat.invoke(messages)
parts = chat.stream(messages)
responses = ChatOpenAI(use_responses_api=True, **settings)
llm = OpenAI(**settings)
show(
    first=first.text,
    second=second.text,
    second_stream="".join(part.text for part in parts),
    second_responses=responses.invoke(messages).text,
    second_responses_stream="".join(part.text for part in responses.stream(messages)),
    prompt=llm.invoke(PROMPT),
    prompt_stream="".join(llm.stream(PROMPT)),
)
