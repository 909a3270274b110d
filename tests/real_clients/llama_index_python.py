"""LlamaIndex: OpenAILike for chats and completions, HuggingFaceInferenceAPI for the routes of TGI."""

from asked import FIRST, MAX_TOKENS, MODEL, PROMPT, SECOND, SYSTEM, URL, show
from llama_index.core.llms import ChatMessage
from llama_index.llms.huggingface_api import HuggingFaceInferenceAPI
from llama_index.llms.openai_like import OpenAILike

settings = {
    "model": MODEL,
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
}
chat = OpenAILike(is_chat_model=True, **settings)
messages = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=FIRST)]
first = chat.chat(messages)
messages += [first.message, ChatMessage(role="user", content=SECOND)]
second = chat.chat(messages)
parts = chat.stream_chat(messages)
llm = OpenAILike(is_chat_model=False, **settings)
hub = HuggingFaceInferenceAPI(
    model=URL, task="text-generation", num_output=MAX_TOKENS, temperature=0.1
)
show(
    first=first.message.content,
    second=second.message.content,
    second_stream="".join(part.delta for part in parts),
    prompt=llm.complete(PROMPT).text,
    prompt_stream="".join(part.delta for part in llm.stream_complete(PROMPT)),
    prompt_hub=hub.complete(PROMPT, do_sample=False).text,
)
