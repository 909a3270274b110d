"""Code that the protocols around TGI and LMI share: parameters, details of an answer, and how a request is made.

A protocol adds a request model and a `Shape`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.detokenizer import Token
from djl_python_neuronx.errors import (
    RequestError,
    UnsupportedParameterError,
    json_type,
)
from djl_python_neuronx.protocol.answers import Answer, AnswerFormatter, Shape
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest
from djl_python_neuronx.protocol.neutral import NEUTRAL
from djl_python_neuronx.protocol.parameters import (
    Count,
    Flag,
    GenerationParameters,
    MaybeCount,
    RequestModel,
    Strings,
    Text,
    log_ignored,
    nearest,
    sampling_params,
    shown_name,
    validated,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason

MAX_TOP_TOKENS = 20
_FIELDS = ("inputs", "parameters", "stream", "model")


class Parameters(GenerationParameters):
    """The parameters of LMI and TGI."""

    details: Flag = False
    do_sample: Flag = False
    ignore_eos_token: Flag = False
    max_new_tokens: MaybeCount = 30
    return_full_text: Flag = False
    stop_sequences: Strings = Field(default_factory=list)
    bad_sequences: Strings = Field(default_factory=list)
    stream: Flag = False
    decoder_input_details: Flag = False
    top_n_tokens: Annotated[
        int,
        Field(ge=0, le=MAX_TOP_TOKENS, description=f"an integer from 0 to {MAX_TOP_TOKENS}"),
    ] = 0
    best_of: Count = 1
    n: Count = 1
    truncate: MaybeCount = None
    adapter_id: str | None = None

    @classmethod
    def of(cls, given: GenerationParameters, **more: object) -> Parameters:
        """The parameters of another protocol's request, over the values that `more` has."""
        shared = given.model_fields_set & GenerationParameters.model_fields.keys()
        return cls(**{**more, **{name: getattr(given, name) for name in shared}})

    @property
    def num_sequences(self) -> int:
        """Sequences to generate for each prompt."""
        return max(self.n, self.best_of)

    @property
    def num_returned(self) -> int:
        """Sequences to return for each prompt, the best ones: all of `best_of` without `n`."""
        return self.n if "n" in self.model_fields_set else self.num_sequences

    @property
    def sampling(self) -> SamplingParams:
        """`do_sample` decides; without it, any parameter that does not apply to greedy requests turns sampling on."""
        values = self.given_sampling()
        samples = self.do_sample
        if "do_sample" not in self.model_fields_set:
            samples = not values.keys() <= set(SamplingParams.GREEDY_NAMES)
        return sampling_params(values, samples=samples)


class Body(RequestModel):
    """A request of TGI."""

    inputs: Text
    parameters: Parameters = Parameters()
    stream: Flag = False
    model: str | None = None


class TokenFields(TypedDict):
    """A token of an answer, or of its prompt. The probability is `log_prob` in LMI and `logprob` in TGI."""

    id: int
    text: str
    log_prob: NotRequired[float | None]
    special_token: NotRequired[bool]
    logprob: NotRequired[float | None]
    special: NotRequired[bool]


class Details(TypedDict):
    """A sequence or the end of a stream. `best_of_sequences` have their text and no `inputs`."""

    finish_reason: FinishReason
    generated_tokens: int
    inputs: NotRequired[str]
    seed: NotRequired[int | None]
    input_length: NotRequired[int]
    tokens: NotRequired[list[TokenFields]]
    prefill: NotRequired[list[TokenFields]]
    top_tokens: NotRequired[list[list[TokenFields]]]
    generated_text: NotRequired[str]
    best_of_sequences: NotRequired[list[Details]]


class GeneratedText(TypedDict):
    """A whole answer."""

    generated_text: str
    details: NotRequired[Details]


def fields(
    payload: Mapping[str, Any], options: ServingOptions, refused: Sequence[str] = ()
) -> tuple[object, Parameters]:
    """`inputs` and the parameters of a payload; `stream` beside `inputs` takes precedence over the parameter.

    Raises:
        RequestError: a field is missing, unknown, not supported (also each of `refused`) or has a wrong value.
    """
    _check_names(payload, options, refused)
    if "inputs" not in payload:
        msg = "inputs is missing; expected a prompt"
        raise RequestError(msg, param="inputs")
    inputs, parameters, stream, _ = map(payload.get, _FIELDS)
    if not isinstance(parameters, (dict, type(None))):
        msg = f"parameters is {json_type(parameters)}; expected an object"
        raise RequestError(msg, param="parameters")
    given = validated(Parameters, parameters or {}, options)
    if stream is not None:
        given.stream = validated(Parameters, {"stream": stream}, options).stream
    return inputs, given


def _check_names(
    payload: Mapping[str, Any], options: ServingOptions, refused: Sequence[str]
) -> None:
    for name, value in payload.items():
        if name in _FIELDS or value is None:
            continue
        known = name in refused or name in Parameters.model_fields or name in NEUTRAL
        if options.unknown_parameters == "warn" and not known:
            log_ignored(name)
            continue
        hint = nearest(name, [*_FIELDS, *Parameters.model_fields])
        if name in Parameters.model_fields:
            hint = ' (it belongs in "parameters")'
        rest = f"{' Expected' if hint.endswith('?') else '; expected'} {', '.join(_FIELDS)}"
        msg = f"unknown field {shown_name(name)} beside inputs{hint}{rest}"
        if name in refused:
            msg = f"{name} is not supported in this version; leave it out"
        raise UnsupportedParameterError(msg, param=name)


class DetailedShape(Shape):
    """LMI's and TGI's common shape: a text, details with a list of its tokens, and the best of several sequences."""

    logprob_name: str

    def __init__(self, given: Parameters, context: ParseContext) -> None:
        self._given, self._tokenizer = given, context.tokenizer

    @abstractmethod
    def token(self, token: Token) -> dict[str, Any]:
        """A token."""

    def score(self, answer: Answer) -> float:
        """The measure by which the best sequence is chosen: the probability of its text."""
        return answer.log_probability

    def facts(self, answer: Answer) -> dict[str, Any]:
        """Details common to every sequence."""
        facts: dict[str, Any] = {
            "finish_reason": answer.finish_reason,
            "generated_tokens": answer.num_tokens,
            "tokens": [self.token(token) for token in answer.tokens],
        }
        if self._given.top_n_tokens:
            facts["top_tokens"] = [
                [self.token(other) for other in token.top] for token in answer.tokens
            ]
        return facts

    def details(self, answer: Answer) -> dict[str, Any]:
        """The details of the best sequence, without the others. It alone has the prompt, which may be long."""
        prefill: dict[str, Any] = {}
        if self._given.decoder_input_details and self._given.details:
            prefill["prefill"] = [
                {"id": token.id, "text": token.text, self.logprob_name: token.logprob}
                for token in answer.prompt_tokens(self._tokenizer)
            ]
        return {**self.facts(answer), **prefill, **answer.prompt_details}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `Shape`."""
        ranked = sorted(answers, key=self.score, reverse=True)
        best, *others = ranked[: self._given.num_returned]
        body: dict[str, Any] = {"generated_text": best.text}
        if self._given.details:
            body["details"] = self.details(best)
            if others:
                body["details"]["best_of_sequences"] = [
                    {**self.facts(other), "generated_text": other.text} for other in others
                ]
        return body


def parsed_request(
    prompts: Sequence[str],
    given: Parameters,
    context: ParseContext,
    shape: Shape,
    protocol: str,
    *,
    stream: str | None = None,
    listed: bool = False,
    most_name: str = "max_new_tokens",
) -> ParsedRequest:
    """The request of so many sequences for each prompt as `given` has.

    `stream`: see `answers.FRAMES`; `listed`: the answer is a list; `most_name`: see `GenerationRequest`.

    Raises:
        RequestError: a parameter or a prompt is not allowed.
    """
    if given.adapter_id and not context.adapter:
        adapter = context.checked_adapter(given.adapter_id, "adapter_id")
        context = replace(context, adapter=adapter)
    sampling, number = given.sampling, given.num_sequences
    _check_number(given, sampling, stream, shape)
    given.stop = [*given.stop, *given.stop_sequences]
    given.ignore_eos = given.ignore_eos or given.ignore_eos_token
    keeps_tokens = given.details or (number > 1 and shape.ranks)
    common = given.request(
        context,
        protocol,
        sampling,
        max_new_tokens=given.max_new_tokens,
        most_name=most_name,
        scores_prompt=0 if given.decoder_input_details and given.details else None,
        logprobs=keeps_tokens or (stream is not None and context.has_logprobs),
        top_logprobs=given.top_n_tokens if keeps_tokens or stream else 0,
    )
    requests = context.requests(
        common,
        prompts,
        count=number,
        truncate=given.truncate,
        side=given.truncation_side,
        special=given.add_special_tokens,
        count_name="n" if given.n == number else "best_of",
    )
    if stream:
        keeps_tokens = common.top_logprobs > 0
    groups: list[list[Answer]] = []
    for i, prompt in enumerate(prompts):
        group = requests[i * number : (i + 1) * number]
        text = prompt if given.return_full_text else ""
        details = shape.prompt_details(prompt)
        groups.append(
            [
                Answer(one, keeps_tokens=keeps_tokens, text=text, prompt_details=details)
                for one in group
            ]
        )
    formatter = AnswerFormatter(groups, shape, stream=stream, listed=listed)
    return ParsedRequest(requests, formatter, stream=stream is not None)


def _check_number(
    given: Parameters, sampling: SamplingParams, stream: str | None, shape: Shape
) -> None:
    if given.num_sequences > given.best_of and "best_of" in given.model_fields_set:
        msg = f"best_of is {given.best_of}; expected at least n, which is {given.n}"
        raise RequestError(msg, param="best_of")
    name = "n" if given.n > 1 else "best_of"
    if stream and given.num_sequences > 1 and shape.ranks:
        msg = "n and best_of above 1 are not answered by a stream; leave them out"
        raise UnsupportedParameterError(msg, param=name)
    if stream and given.decoder_input_details:
        msg = "decoder_input_details is not answered by a stream; leave it out"
        raise UnsupportedParameterError(msg, param="decoder_input_details")
    if given.num_sequences > 1 and sampling.temperature == 0:
        msg = "n and best_of above 1 need sampling, greedy sequences are all the same; set do_sample or temperature"
        raise RequestError(msg, param=name)
