"""pydantic-ai's agent, with the history of its first run."""

from asked import FIRST, MAX_TOKENS, MODEL, SECOND, SYSTEM, URL, show
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
agent = Agent(
    model, system_prompt=SYSTEM, model_settings={"temperature": 0, "max_tokens": MAX_TOKENS}
)
first = agent.run_sync(FIRST)
second = agent.run_sync(SECOND, message_history=first.all_messages())
stream = agent.run_stream_sync(SECOND, message_history=first.all_messages())
show(first=first.output, second=second.output, second_stream=stream.get_output())
