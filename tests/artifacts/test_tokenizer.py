"""Our tokenizers against the library's own: the text of ids, BOS, chat templates, threads, missing files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers

from djl_python_neuronx.artifacts.tokenizer import PythonTokenizer, load_tokenizer
from djl_python_neuronx.engine.detokenizer import TextStream
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    RequestError,
    ServingError,
    UnsupportedParameterError,
)
from djl_python_neuronx.types import GenerationRequest, Rendering, TokenOutput
from tests.artifacts import tokenizer_folders as folders

MADE = {
    "byte_level": folders.byte_level(),
    "llama": folders.sentencepiece(),
    "metaspace": folders.sentencepiece(metaspace=True),
    "wordpiece": folders.wordpiece(),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: load_tokenizer(
            folders.write(
                root / name,
                made,
                chat_template=folders.CHAT_TEMPLATE,
                clean_up_tokenization_spaces=True,
                **folders.special_tokens(made),
            )
        )
        for name, made in MADE.items()
    }


@pytest.mark.parametrize("name", MADE)
def test_encode_gives_the_librarys_ids(loaded, name):
    for text in ["", "x", " two  spaces ", *folders.CORPUS[:3]]:
        assert loaded[name].encode(text) == MADE[name].encode(text).ids


@pytest.mark.parametrize("name", MADE)
def test_a_prompt_that_begins_with_bos_gets_no_second(loaded, name):
    bos = MADE[name].token_to_id("<s>")
    ids = loaded[name].encode("<s>The quick fox")
    assert ids == MADE[name].encode("<s>The quick fox", add_special_tokens=False).ids
    assert ids.count(bos) == 1
    # What was written twice on purpose stays: only the tokenizer's own is dropped.
    assert loaded[name].encode("<s><s>The").count(bos) == 2
    assert loaded[name].encode("The", special=False).count(bos) == 0
    assert loaded[name].encode("<s><s>The", special=False).count(bos) == 2


def test_a_bos_that_the_tokenizer_does_not_add_is_kept(tmp_path):
    made = folders.byte_level()
    described = json.loads(made.to_str())
    described["post_processor"] = None
    bare = type(made).from_str(json.dumps(described))
    tokenizer = load_tokenizer(folders.write(tmp_path, bare, bos_token="<s>", eos_token="<s>"))
    bos = made.token_to_id("<s>")
    assert bos not in tokenizer.encode("The")
    assert tokenizer.encode("<s><s>The")[:2] == [bos, bos]


def test_a_chat_goes_through_the_template_with_one_bos(loaded):
    ids = loaded["llama"].encode_chat([{"role": "user", "content": "The fox"}])
    expected = (
        MADE["llama"]
        .encode("<s><|turn|>user: The fox<|turn|>assistant:", add_special_tokens=False)
        .ids
    )
    assert ids == expected
    assert ids.count(MADE["llama"].token_to_id("<s>")) == 1


def test_without_a_template_messages_are_refused(tmp_path):
    tokenizer = load_tokenizer(folders.write(tmp_path, MADE["llama"]))
    with pytest.raises(UnsupportedParameterError, match=r"no chat template.*option\.chat_template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_in_a_file_of_its_own_is_used(tmp_path, loaded):
    folder = folders.write(tmp_path, MADE["llama"], **folders.special_tokens(MADE["llama"]))
    (folder / "chat_template.jinja").write_text(folders.CHAT_TEMPLATE, encoding="utf-8")
    messages = [{"role": "user", "content": "The fox"}]
    assert load_tokenizer(folder).encode_chat(messages) == loaded["llama"].encode_chat(messages)


def test_another_template_takes_the_place_of_the_models_own(tmp_path, loaded):
    folder = folders.write(tmp_path, MADE["llama"], **folders.special_tokens(MADE["llama"]))
    messages = [{"role": "user", "content": "The fox"}]
    found = load_tokenizer(folder, chat_template=folders.CHAT_TEMPLATE)
    assert found.encode_chat(messages) == loaded["llama"].encode_chat(messages)
    template = "{% for message in messages %}{{ raise_exception('no') }}{% endfor %}"
    with pytest.raises(RequestError, match="no"):
        load_tokenizer(folder, chat_template=template).encode_chat(messages)


def test_a_developer_is_the_system_to_a_template_that_lacks_the_role(tmp_path):
    folder = folders.write(tmp_path, MADE["llama"])
    roles = "{% for message in messages %}{{ message.role }}{% endfor %}"
    messages = [{"role": "developer", "content": ""}, {"role": "user", "content": ""}]
    for template, text in ((roles, "systemuser"), (roles + "{# developer #}", "developeruser")):
        tokenizer = load_tokenizer(folder, chat_template=template)
        assert tokenizer.decode(tokenizer.encode_chat(messages)).lstrip() == text


def test_a_template_gets_tools_calls_and_results_as_it_takes_them(tmp_path):
    folder = folders.write(tmp_path, MADE["byte_level"])
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    call = {"id": "1", "function": {"name": "find", "arguments": {"q": "é"}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "tool", "content": "y", "tool_call_id": "2"},
    ]
    results = "{% for message in messages[1:] %}{{ message.name | default('-') }}{% endfor %}"
    for added, text in (
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", '{"q": "é"}'),
        ("{{ 'a' + messages[0].tool_calls[0].function.arguments + 'b' }}", 'a{"q": "é"}b'),
        ("{{ 'a' + messages[0]['tool_calls'][0]['function']['arguments']+ 'b' }}", 'a{"q": "é"}b'),
    ):
        tokenizer = load_tokenizer(folder, chat_template="{{ tools | tojson }}" + added + results)
        assert tokenizer.template.startswith("{{ tools")
        for tools, shown in (([tool], json.dumps([tool])), ((), "null")):
            found = tokenizer.render(messages, Rendering(tools=tools))
            assert found == f"{shown}{text}find-"
    assert call["function"]["arguments"] == {"q": "é"}


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}'),
        (
            '{"a": 1e400, "b": -1e400}',
            '{"a": 1.7976931348623157e+308, "b": -1.7976931348623157e+308}',
        ),
        ('{"b": 123456789012345678901234567890}', '{"b": 123456789012345678901234567890}'),
        ('{"t": "\\u00e9", "f": 1.50}', '{"t": "é", "f": 1.5}'),
    ],
)
def test_arguments_in_text_are_added_as_they_are(tmp_path, sent, shown):
    folder = folders.write(tmp_path, MADE["byte_level"])
    calls = [{"id": "1", "function": {"name": "find", "arguments": sent}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    arguments = "messages[0].tool_calls[0].function.arguments"
    for template, text in (
        (f"'a' + {arguments} + 'b'", f"a{sent}b"),
        (f"{arguments} | tojson", shown),
    ):
        found = load_tokenizer(folder, chat_template=f"{{{{ {template} }}}}")
        assert found.render(messages) == text


def test_tools_that_lack_what_a_template_adds(tmp_path):
    folder = folders.write(tmp_path, MADE["byte_level"])
    users = [{"role": "user", "content": "x"}]
    adds = (
        "{% for tool in tools %}{{ tool.function.description is defined }}"
        "{{ 'Description: ' + tool.function.description }}{{ tool.function.parameters | tojson }}{% endfor %}"
    )
    found = load_tokenizer(folder, chat_template=adds)
    for left_out in ({}, {"description": None, "parameters": None}):
        tool = {"type": "function", "function": {"name": "find", **left_out}}
        shown = found.render(users, Rendering(tools=[tool]))
        assert shown == 'TrueDescription: {"type": "object", "properties": {}}'
        # Only where the template fails without.
        plain = load_tokenizer(folder, chat_template="{{ tools | tojson }}")
        assert plain.render(users, Rendering(tools=[tool])) == json.dumps([tool])
    for fault in ("tools[0].nothing.at_all", "raise_exception('no')"):
        fails = load_tokenizer(folder, chat_template=f"{{{{ {fault} }}}}")
        with pytest.raises(RequestError, match="these messages or tools") as caught:
            fails.render(users, Rendering(tools=[tool]))
        assert caught.value.param is None


SMALL = """\
{%- if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}{% set system = messages[0]['content'] %}
{%- else %}{% set system = messages[0]['content'][0]['text'] %}{% endif %}
{%- set rest = messages[1:] %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if message['role'] == 'user' %}[INST]
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for block in message['content'] %}({{ block['text'] }}){% endfor %}{% endif %}[/INST]
{%- elif message['role'] == 'tool' %}[TOOL_RESULTS]{{ message.content | string }}[/TOOL_RESULTS]
{%- else %}{{ message['content'] }}
{%- for call in message.tool_calls | default([]) %}[TOOL_CALLS]{{ call.function.name }}{% endfor %}
{%- endif %}{% endfor %}"""
"""In the shape of Mistral Small 3.1's."""


def test_only_the_users_parts_reach_a_template(tmp_path):
    found = load_tokenizer(folders.write(tmp_path, MADE["byte_level"]), chat_template=SMALL)

    def message(role, *texts, **more):
        return {"role": role, "content": [{"type": "text", "text": one} for one in texts], **more}

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        message("developer", "S1", "S2"),
        message("user", "U1", "U2"),
        message("assistant", "A1", "A2", tool_calls=[call]),
        message("tool", "R1", "R2", tool_call_id="1"),
    ]
    assert found.render(messages) == (
        "[SYSTEM_PROMPT]S1\nS2[/SYSTEM_PROMPT][INST](U1)(U2)[/INST]A1\nA2[TOOL_CALLS]f"
        "[TOOL_RESULTS]R1\nR2[/TOOL_RESULTS]"
    )


@pytest.mark.parametrize(
    ("loop", "takes_parts"),
    [
        ("for item in message['content']", True),  # Gemma 3
        ("- for part in message.content -", True),  # GLM-4
        ("for content in message['content']", True),  # Llama 3.2 Vision
        ('for block in message["content"] if block', True),
        ("for item in message.content | list", True),
        ("set content = message.content %}{% for item in content", True),  # Qwen3.5
        ("for part in message.content.split('</think>')", False),  # Qwen3
        ("for part in contents", False),
        ("for call in message.tool_calls", False),
    ],
)
def test_a_template_that_takes_parts_one_by_one_gets_them(tmp_path, loop, takes_parts):
    folder = folders.write(tmp_path, MADE["byte_level"])
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
        f"{{% else %}}{{%{loop}%}}x{{% endfor %}}{{{{ message.content | length }}}}{{% endif %}}{{% endfor %}}"
    )
    parts = [{"type": "text", "text": text} for text in ("one", "two", "six")]
    found = load_tokenizer(folder, chat_template=template)
    assert found.render([{"role": "user", "content": parts}]) == (
        "xxx3" if takes_parts else "one\ntwo\nsix"
    )
    assert found.render([{"role": "user", "content": "one"}]) == "one"


def test_how_a_template_is_rendered(tmp_path, loaded):
    found = loaded["llama"]
    chat = [{"role": "user", "content": "The fox"}, {"role": "assistant", "content": "The end"}]
    apply = found.library.apply_chat_template
    assert found.render(chat) == apply(chat, tokenize=False, add_generation_prompt=True)
    closed = found.render(chat, Rendering(begins_turn=False))
    assert closed == apply(chat, tokenize=False, add_generation_prompt=False)
    assert found.render(chat, Rendering({}, False, True)).endswith("The end")
    template = "{{ enable_thinking }}{{ messages | length }}{{ deep.a[0] }}"
    other = load_tokenizer(folders.write(tmp_path, MADE["llama"]), chat_template=template)
    assert (
        other.render(chat, Rendering({"enable_thinking": False, "deep": {"a": [7]}})) == "False27"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "conversation", "tools", "documents", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "chat_template", "return_dict", "bos_token"),
        *("self", "conversations"),
    ],
)
def test_a_variable_replaces_nothing_that_the_server_sets(loaded, name):
    with pytest.raises(RequestError, match=f"chat_template_kwargs has '{name}'") as caught:
        loaded["llama"].encode_chat(
            [{"role": "user", "content": "x"}], rendering=Rendering({"a": 1, name: "x"})
        )
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_the_templates_own_refusal_is_told_but_no_content(loaded):
    with pytest.raises(RequestError, match="System role is not supported"):
        loaded["llama"].encode_chat([{"role": "system", "content": "secret"}])
    for message in ({"role": "echo", "content": "secret"}, {"role": "user", "content": ["secret"]}):
        with pytest.raises(
            RequestError, match=r"chat template (refuses|fails on) these messages"
        ) as caught:
            loaded["llama"].encode_chat([message])
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", MADE)
def test_text_that_is_not_unicode_is_the_requests_fault(loaded, name):
    with pytest.raises(RequestError, match="cannot be tokenised") as caught:
        loaded[name].encode("secret \ud800")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["byte_level", "llama", "metaspace"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_concatenate_to_the_librarys_text(loaded, name, data):
    """Any ids whose bytes are valid UTF-8, after a context: the start of a text loses its space in some decoders."""
    tokenizer, made = loaded[name], MADE[name]
    words = data.draw(
        st.lists(st.sampled_from([*folders.CORPUS[0].split(), "你好", "😀", "<think>", "é", "\n"]))
    )
    ids = made.encode(" ".join(words), add_special_tokens=False).ids
    ids += data.draw(
        st.lists(st.sampled_from([*sorted(tokenizer.special_ids), made.token_to_id("<think>")]))
    )
    context = made.encode("a", add_special_tokens=False).ids
    text = b"".join(tokenizer.pieces[i] for i in context + ids).decode()
    assert text.removeprefix(" ") == made.decode(context + ids).removeprefix(" ")


@pytest.mark.parametrize("name", ["byte_level", "llama", "metaspace"])
def test_every_piece_is_what_its_id_adds_to_a_text(loaded, name):
    tokenizer, made = loaded[name], MADE[name]
    anchor = made.encode("a", add_special_tokens=False).ids
    before = made.decode(anchor)
    assert len(tokenizer.pieces) == made.get_vocab_size()
    for token_id, piece in enumerate(tokenizer.pieces):
        assert made.decode([*anchor, token_id])[len(before) :] == piece.decode(errors="replace")


@pytest.mark.parametrize("name", MADE)
def test_the_bytes_of_a_token_are_what_it_adds_to_a_text(loaded, name):
    """Also without a table, where a part of a character has the bytes of U+FFFD."""
    fast, made = loaded[name], MADE[name]
    slow = PythonTokenizer(fast.library)
    anchor = made.encode("a", add_special_tokens=False).ids
    before = made.decode(anchor)
    for token_id in range(made.get_vocab_size()):
        text = made.decode([*anchor, token_id])[len(before) :]
        if token_id in fast.special_ids:
            text = made.id_to_token(token_id)
        assert fast.token_bytes(token_id).decode(errors="replace") == text
        if token_id in slow.special_ids or token_id not in fast.special_ids:
            assert slow.token_bytes(token_id).decode() == text
    assert fast.token_bytes(10**6) == slow.token_bytes(10**6) == b""


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_the_bytes_of_a_part_of_a_character_are_its_own(loaded, name):
    ids = MADE[name].encode("a😀", add_special_tokens=False).ids[-4:]
    assert [loaded[name].token_bytes(one) for one in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


@pytest.mark.parametrize("name", MADE)
def test_the_end_of_a_text_is_the_librarys(loaded, name):
    assert loaded[name].eos_id == MADE[name].token_to_id("</s>")


def test_a_tokenizer_may_know_no_end(tmp_path):
    assert load_tokenizer(folders.write(tmp_path, MADE["llama"])).eos_id is None


def test_special_ids_have_no_text_and_added_words_do(loaded):
    made, tokenizer = MADE["byte_level"], loaded["byte_level"]
    assert tokenizer.special_ids == {made.token_to_id(t) for t in ("<s>", "</s>", "<|turn|>")}
    assert {tokenizer.pieces[i] for i in tokenizer.special_ids} == {b""}
    assert tokenizer.pieces[made.token_to_id("答 案")] == "答 案".encode()


def test_a_decoder_that_looks_at_neighbours_has_no_pieces(loaded):
    assert loaded["wordpiece"].pieces is None


def test_pieces_that_the_decoder_contradicts_are_given_up(tmp_path):
    """A Strip that works on each token drops every space: the decoder's parts look right, its text is not the sum."""
    described = json.loads(MADE["llama"].to_str())
    described["decoder"]["decoders"] = [
        step for step in described["decoder"]["decoders"] if step["type"] != "Fuse"
    ]
    made = type(MADE["llama"]).from_str(json.dumps(described))
    assert load_tokenizer(folders.write(tmp_path, made)).pieces is None


@pytest.mark.parametrize("name", MADE)
def test_decode_is_the_librarys_without_cleaning_up(loaded, name):
    ids = MADE[name].encode("<s>The fox , doesn 't it ?").ids
    assert loaded[name].decode(ids) == MADE[name].decode(ids)


def test_stored_padding_and_truncation_do_not_apply(tmp_path):
    made = folders.byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    text = folders.CORPUS[0]
    assert (
        load_tokenizer(folders.write(tmp_path, made)).encode(text)
        == MADE["byte_level"].encode(text).ids
    )


def test_threads_share_a_tokenizer(loaded):
    texts = [f"{i} {text}" for i, text in enumerate(folders.CORPUS)]
    expected = [MADE["llama"].encode(text).ids for text in texts]
    seen: list[list[list[int]]] = []

    def work():
        seen.append([loaded["llama"].encode(text) for text in texts])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 8


def test_other_threads_run_while_a_long_text_is_encoded(loaded):
    """Counts what another thread gets done meanwhile; with the GIL held it would always be next to nothing."""

    def turns_meanwhile():
        started, done = threading.Event(), threading.Event()
        turns = 0

        def encode():
            started.set()
            loaded["byte_level"].encode("jumps over the lazy dog " * 50_000)
            done.set()

        thread = threading.Thread(target=encode)
        thread.start()
        started.wait()
        while not done.is_set():
            done.wait(0.0005)
            turns += 1
        thread.join()
        return turns

    # A busy machine may let this thread sleep through one of them.
    assert any(turns_meanwhile() > 20 for _ in range(10))


def test_a_class_name_of_transformers_5_loads_with_any_version(tmp_path):
    folder = folders.write(tmp_path, MADE["byte_level"], tokenizer_class="TokenizersBackend")
    assert load_tokenizer(folder).encode("fox") == MADE["byte_level"].encode("fox").ids


@pytest.mark.parametrize("folder", [".", "absent"])
def test_missing_files_are_named(tmp_path, folder):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ArtifactNotFoundError, match=r"tokenizer\.json, tokenizer\.model"):
        load_tokenizer(tmp_path / folder)


def test_a_damaged_file_is_an_artifact_error(tmp_path):
    folder = folders.write(tmp_path, MADE["byte_level"])
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        load_tokenizer(folder)


REMOTE_CODE = '''
from transformers import PreTrainedTokenizer

class Letters(PreTrainedTokenizer):
    """Ids are letters; `~` is special."""
    vocab_size = 128
    def __init__(self, **kwargs):
        self._by_id = {i: chr(i) for i in range(128)}
        super().__init__(**{**kwargs, "eos_token": "~"})
    def get_vocab(self):
        return {chr(i): i for i in range(128)}
    def _tokenize(self, text, **kwargs):
        return list(text)
    def _convert_token_to_id(self, token):
        return ord(token)
    def _convert_id_to_token(self, index):
        return self._by_id.get(index)
    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
    def save_vocabulary(self, *args, **kwargs):
        return ()
'''


def test_a_tokenizer_with_code_of_its_own_needs_trust(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "letters.py").write_text(REMOTE_CODE, encoding="utf-8")
    (folder / "vocab.txt").touch()
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    config = {
        "tokenizer_class": "Letters",
        "auto_map": {"AutoTokenizer": ["letters.Letters", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"auto_map.*option\.trust_remote_code=true") as caught:
        load_tokenizer(folder)
    assert "hf.co" not in str(caught.value)  # of a stranger's repository with the folder's name
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert tokenizer.encode("fox") == [ord(char) for char in "fox"]
    assert tokenizer.decode([*map(ord, "fox ")]) == "fox "
    assert tokenizer.pieces is None
    assert tokenizer.special_ids == {ord("~")}
    # Spaces around added tokens, of which only transformers 4 makes any.
    tokenizer.library.add_tokens(["<tool>"])
    ids = [*b"fo", tokenizer.library.convert_tokens_to_ids("<tool>"), *b"x~x"]
    for skip, spaces in product((True, False), repeat=2):

        def decoded(ids, skip=skip, spaces=spaces):
            return tokenizer.library.decode(
                ids,
                skip_special_tokens=skip,
                spaces_between_special_tokens=spaces,
                clean_up_tokenization_spaces=False,
            )

        assert tokenizer.decode(ids, skip=skip, spaces=spaces) == decoded(ids)
        request = GenerationRequest("r", ids[:1], skips_special=skip, spaces_special=spaces)
        stream = TextStream(request, tokenizer)
        deltas = [stream.feed(TokenOutput("r", (one,))) for one in ids[1:]]
        assert decoded(ids[:1]) + "".join(delta.text for delta in deltas if delta) == decoded(ids)
    # This library fails for ids beyond its vocabulary, as some models have them.
    assert [tokenizer.token_bytes(one) for one in (*b"f~", 200)] == [b"f", b"~", b""]


def test_importing_it_does_not_import_transformers():
    code = "import sys, djl_python_neuronx.artifacts.tokenizer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_special_token_that_no_configuration_names_is_special(tmp_path):
    made = folders.byte_level()
    made.add_special_tokens([AddedToken("<|eot|>", special=True)])
    tokenizer = load_tokenizer(
        folders.write(tmp_path / "made", made, **folders.special_tokens(made))
    )
    eot = made.token_to_id("<|eot|>")
    assert tokenizer.special_id("<|eot|>") == eot
    assert tokenizer.special_id("eot") is None
    assert tokenizer.library.decode([eot], skip_special_tokens=True) == ""
    assert eot in tokenizer.special_ids


def test_a_tokenizer_without_a_decoder_has_no_pieces(tmp_path):
    made = folders.byte_level()
    made.decoder = None
    tokenizer = load_tokenizer(folders.write(tmp_path, made, **folders.special_tokens(made)))
    assert tokenizer.pieces is None
    ids = made.encode("The fox").ids
    assert tokenizer.decode(ids) == made.decode(ids)


PATHOLOGICAL = Regex("(a+)+$")
"""Takes exponential time for many a and something else: the library's regex engine gives up, and panics."""


def test_a_regex_that_backtracks_too_long_fails_its_text_only(tmp_path, caplog):
    made = folders.byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PATHOLOGICAL, "isolated"), made.pre_tokenizer]
    )
    tokenizer = load_tokenizer(folders.write(tmp_path, made))
    assert tokenizer.encode("Hello")
    with pytest.raises(ServingError, match="tokenizer failed on this text") as caught:
        tokenizer.encode("a" * 40 + "b")
    assert not isinstance(caught.value, RequestError)
    assert "tokenizer_panicked" in caplog.text
    assert tokenizer.encode("Hello")


def test_a_panic_of_the_decoder_is_an_error_too(tmp_path):
    made = folders.byte_level()
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(PATHOLOGICAL, "")])
    tokenizer = load_tokenizer(folders.write(tmp_path, made))
    assert tokenizer.pieces is None  # so that streams decode with the library
    ids = tokenizer.encode("a" * 40 + "b")
    with pytest.raises(ServingError, match="tokenizer failed on this text"):
        tokenizer.decode(ids)


def test_a_panic_during_the_load_is_an_error(tmp_path, monkeypatch):
    made = folders.byte_level()
    made.pre_tokenizer = pre_tokenizers.Split(PATHOLOGICAL, "isolated")
    broken = load_tokenizer(folders.write(tmp_path, made))

    def panic(*_, **__):
        broken._backend.encode_batch_fast(["a" * 40 + "b"])

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", panic)
    with pytest.raises(ServingError, match="tokenizer failed"):
        load_tokenizer(tmp_path)


def test_torch_is_hidden_no_longer_than_an_import():
    """In a process of its own: this one has imported it."""
    code = (
        "import sys; from djl_python_neuronx.artifacts import tokenizer\n"
        "with tokenizer._without_torch():\n    assert sys.modules['torch'] is None\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
