"""Parts of SageMaker that moto lacks."""

from __future__ import annotations

import json
from types import SimpleNamespace

from moto.applicationautoscaling import responses
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.models import FakeEndpointConfig
from moto.sagemaker.responses import SageMakerResponse

COPIES = SimpleNamespace(value="sagemaker:inference-component:DesiredCopyCount")


def complete(set_attribute=setattr):
    """Add newer instance types and dimensions, updates of endpoints, and an inference component that does not exist."""
    set_attribute(FakeEndpointConfig, "validate_instance_type", lambda *_: None)
    known = [*responses.ScalableDimensionValueSet, COPIES]
    set_attribute(responses, "ScalableDimensionValueSet", known)
    SageMakerResponse.update_endpoint = _update_endpoint
    for operation in ("delete_inference_component", "describe_inference_component"):
        refuse(operation, 'Could not find inference component "chat".', set_attribute)


def refuse(operation, message, set_attribute=setattr):
    """Answer an operation with an error."""

    def answer(_):
        raise ValidationError(message)

    if not hasattr(SageMakerResponse, operation):
        setattr(SageMakerResponse, operation, None)
    set_attribute(SageMakerResponse, operation, answer)


def _update_endpoint(response):
    endpoint = response.sagemaker_backend.endpoints[response._get_param("EndpointName")]
    endpoint.endpoint_config_name = response._get_param("EndpointConfigName")
    return json.dumps({"EndpointArn": endpoint.arn})
