"""LangChain's HuggingFaceEndpoint, and ChatHuggingFace on top of it."""

from asked import FIRST, MAX_TOKENS, PROMPT, SECOND, SYSTEM, URL, show
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

llm = HuggingFaceEndpoint(endpoint_url=URL, max_new_tokens=MAX_TOKENS, do_sample=False)
streaming = HuggingFaceEndpoint(
    endpoint_url=URL, max_new_tokens=MAX_TOKENS, do_sample=False, streaming=True
)
chat = ChatHuggingFace(llm=llm).bind(temperature=0)
messages = [SystemMessage(SYSTEM), HumanMessage(FIRST)]
first = chat.invoke(messages)
messages += [first, HumanMessage(SECOND)]
second = chat.invoke(messages)
show(
    first=first.text,
    second=second.text,
    second_stream="".join(part.text for part in chat.stream(messages)),
    prompt=llm.invoke(PROMPT),
    prompt_stream="".join(streaming.stream(PROMPT)),
)
