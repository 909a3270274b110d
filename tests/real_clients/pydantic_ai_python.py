"""pydantic-ai's agent, with the history of its first run."""

from asked import FIRST, MAX_TOKENS, MODEL, SECOND, SYSTEM, URL, show
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
agent = Agent(
    OpenAIChatModel(MODEL, provider=provider),
    system_prompt=SYSTEM,
    model_settings={"temperature": 0, "max_tokens": MAX_TOKENS},
)
first = agent.run_sync(FIRST)
second = agent.run_sync(SECOND, message_history=first.all_messages())
stream = agent.run_stream_sync(SECOND, message_history=first.all_messages())
responses = OpenAIResponsesModel(MODEL, provider=provider)
other = agent.run_sync(SECOND, message_history=first.all_messages(), model=responses)
show(
    first=first.output,
    second=second.output,
    second_stream=stream.get_output(),
    second_responses=other.output,
)
