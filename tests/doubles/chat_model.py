"""A model of chats: a tokenizer of bytes with a chat template, and a device that writes texts it was given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from djl_python_neuronx.artifacts.tokenizer import for_template
from djl_python_neuronx.backends.base import Float32Array, Rows
from djl_python_neuronx.types import RENDERING, Rendering
from tests.doubles.byte_tokenizer import ByteTokenizer
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend

EOS = 2
TEMPLATE = """\
{%- if tools %}[TOOLS]{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Write <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>
{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}
{%- if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}"""
"""In the shape of Qwen's."""


class ChatTokenizer(ByteTokenizer):
    """Special tokens of its own from 290 on, and a template."""

    def __init__(self, template: str = TEMPLATE, special: Sequence[str] = ()) -> None:
        super().__init__()
        self.template = template
        self._special = {text: 290 + i for i, text in enumerate(special)}
        assert self.pieces is not None
        self.pieces = [*self.pieces[:290], *[b""] * 10]
        self.special_ids = self.special_ids | set(self._special.values())
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # as transformers
        self._jinja = environment.from_string(template)
        self.rendered: list[str] = []
        """The texts of all conversations."""

    def special_id(self, text: str) -> int | None:
        """See `Tokenizer`."""
        return self._special.get(text)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """An id for each byte, and for each special token."""
        ids = [1] if special else []
        for part in re.split(f"({'|'.join(map(re.escape, self._special))})", text):
            known = self._special.get(part)
            ids += super().encode(part, special=False) if known is None else [known]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int | None = None,
        rendering: Rendering = RENDERING,
    ) -> list[int]:
        """The ids of the template's text."""
        self.rendered.append(
            self._jinja.render(
                messages=for_template(messages, self.template),
                tools=[*rendering.tools] or None,
                add_generation_prompt=rendering.begins_turn,
                **rendering.variables,
            )
        )
        return self.encode(self.rendered[-1])

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        named = {number: text.encode() for text, number in self._special.items()}
        return named.get(token_id) or super().token_bytes(token_id)


class ScriptedBackend(ToyBackend):
    """Answers a prompt that has a text of `scripts`, the last one of several, with what stands there, and eos.

    Other tokens are unlikely, but possible: a grammar may ask for them.
    """

    def __init__(self, tokenizer: ChatTokenizer, scripts: Mapping[str, str], **facts: Any) -> None:
        spec = replace(
            TOY_SPEC,
            max_model_len=8192,
            prefill_buckets=(4096,),
            token_buckets=(8192,),
            **facts,
        )
        super().__init__(spec)
        self._tokenizer, self._scripts = tokenizer, scripts
        self._answers: dict[int, tuple[int, list[int]]] = {}

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """See `Backend`."""
        prompt = b"".join(map(self._tokenizer.token_bytes, prompt_ids)).decode(errors="replace")
        asked = max(self._scripts, key=prompt.rfind)
        self._require(asked in prompt, f"no script answers {prompt!r}")
        ids = self._tokenizer.encode(self._scripts[asked], special=False)
        self._answers[slot] = len(prompt_ids), [*ids, EOS]
        return super().acquire(slot, prompt_ids, adapter, salt)

    def _compute(self, rows: Rows) -> Float32Array:
        logits = super()._compute(rows)
        for i, slot in enumerate(rows.slots.tolist()):
            size, answer = self._answers[slot]
            done = int(rows.starts[i] + rows.lens[i]) - size
            logits[i, -1, answer[min(max(done, 0), len(answer) - 1)]] = 100.0
        return logits
