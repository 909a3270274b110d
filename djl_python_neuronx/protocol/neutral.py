"""Fields of requests that other servers have and this one has not, with the values that have no effect there.

Clients send these values by default. Source: OpenAI's API reference, 2026-11; vllm 002032ee,
vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py, 010a69ce,
vllm/entrypoints/openai/responses/protocol.py, and 0.6 to 0.11, sampling_params.py;
sglang 004c82e0, srt/entrypoints/openai/protocol.py; text-generation-inference db931fcf, router/src/lib.rs; djl-serving
0.31, lmi_input_output_schema.md; transformers 4.57, GenerationConfig; anthropic 2.14 (PyPI),
types/message_create_params.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

_FIELDS = """
[] | audio bootstrap_host bootstrap_port bootstrap_room chat_template constraints container
[] | custom_logit_processor data_parallel_rank disagg_prefill_dp_rank ebnf extra_key force_words_ids guided_decoding
[] | input_ids json_schema logprob_token_ids logprobs lora_path max_dynamic_patch min_dynamic_patch moderation
[] | ngram_corpus_id prediction prompt_embeds prompt_logprobs reasoning_effort regex repetition_detection routed_dp_rank
[] | sequence_bias stop_regex task thread verbosity watermarking_config web_search_options
[false] | early_stopping echo enable_response_messages flat_logprobs no_stop_trim output_attentions output_hidden_states
[false] | output_scores remove_invalid_values renormalize_logits return_cached_tokens_details return_dict_in_generate
[false] | return_hidden_states return_meta_info return_prompt_text return_prompt_token_ids return_routed_experts
[false] | return_token_ids return_token_offsets token_healing use_audio_in_video use_beam_search watermark watermarking
[true] | detokenize include_reasoning return_mm_kwargs separate_reasoning stream_reasoning use_cache
[0] | diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff penalty_alpha routed_experts_prompt_start
[0] | routed_experts_start_len
[1] | best_of encoder_repetition_penalty guidance_scale length_penalty num_beam_groups num_beams num_return_sequences
[1] | stream_interval
[-1] | thinking_token_budget
[[]] | documents functions logits_processors mcp_servers tools
[{}] | custom_params ec_transfer_params extra_args extra_body images_config kv_transfer_params media_io_kwargs
[{}] | mm_processor_kwargs session_params vllm_xargs
[""] | suffix
["none"] | function_call
["none", "auto"] | tool_choice
[["text"]] | modalities
"""
"""Values, in JSON, and the fields that are accepted with them beside null. There are no tools to choose from."""
_SWITCHES = {"tools": "tool_choice", "functions": "function_call"}
"""Field to the one beside it that switches it off with "none"."""
_NO_EFFECT = (
    "custom_labels guided_decoding_backend metadata parallel_tool_calls prompt_cache_key prompt_cache_options "
    "prompt_cache_retention request_id rid service_tier session_id store tool_prompt"
)
_OF_MESSAGES = (
    "anthropic_beta anthropic_version betas cache_control context_management diagnostics inference_geo speed "
    "user_profile_id"
)
_OF_RESPONSES = "access_programs background_options client_metadata context_management image"
NEUTRAL: Mapping[str, Sequence[object]] = {
    name: orjson.loads(values)
    for values, names in (line.split(" | ") for line in _FIELDS.split("\n") if line)
    for name in names.split()
}
"""Field to the values that are accepted beside null; any other is refused."""
WITHOUT_EFFECT = frozenset(_NO_EFFECT.split())
"""Fields that change no answer in any protocol, whatever their value is."""
OF_MESSAGES = WITHOUT_EFFECT.union(_OF_MESSAGES.split())
OF_RESPONSES = WITHOUT_EFFECT.union(_OF_RESPONSES.split())
"""Those of Anthropic's Messages and of OpenAI's responses."""


def is_neutral(name: str, value: object, beside: Mapping[str, object]) -> bool:
    """True if a field that this server lacks has a value without effect, or is switched off `beside` it."""
    return beside.get(_SWITCHES.get(name, "")) == "none" or any(
        # Not equality alone: False equals 0.
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL.get(name, ())
    )
