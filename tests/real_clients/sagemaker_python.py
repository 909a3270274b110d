"""boto3's client of SageMaker Runtime, with the iterator over lines of AWS's SDK for SageMaker."""

import json

import boto3
from asked import MAX_TOKENS, OPENING, PROMPT, SECOND, URL, show
from sagemaker.core.iterators import LineIterator

runtime = boto3.client(
    "sagemaker-runtime",
    endpoint_url=URL,
    region_name="us-east-1",
    aws_access_key_id="none",
    aws_secret_access_key="none",
)
endpoint = {"EndpointName": "endpoint", "ContentType": "application/json"}


def invoke(body):
    """The answer to a body."""
    response = runtime.invoke_endpoint(Body=json.dumps(body), **endpoint)
    return json.loads(response["Body"].read())


def stream(body):
    """The lines of an answer to a body."""
    response = runtime.invoke_endpoint_with_response_stream(
        Body=json.dumps(body | {"stream": True}), **endpoint
    )
    return [json.loads(line) for line in LineIterator(response["Body"])]


generate = {"inputs": PROMPT, "parameters": {"max_new_tokens": MAX_TOKENS}}
chat = {"messages": list(OPENING), "temperature": 0, "max_tokens": MAX_TOKENS}
first = invoke(chat)["choices"][0]["message"]
chat["messages"] += [first, {"role": "user", "content": SECOND}]
show(
    first=first["content"],
    second=invoke(chat)["choices"][0]["message"]["content"],
    second_stream="".join(
        chunk["choices"][0]["delta"].get("content", "") for chunk in stream(chat)
    ),
    prompt=invoke(generate)["generated_text"],
    prompt_stream="".join(line["token"]["text"] for line in stream(generate)),
)
