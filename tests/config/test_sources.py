"""Names, places and bytes: what each source makes of what it is given."""

import json
from typing import ClassVar

import javaproperties
import pytest

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.options import NAMES, ServingOptions, option, parse_value
from djl_python_neuronx.config.sources import DJL, Inputs, Setting
from djl_python_neuronx.errors import ConfigError


def told(settings):
    return [(setting.name, setting.value, setting.origin) for setting in settings]


def written(name, value, origin="the file", source="serving.properties", by_user=True):
    return Setting(name, value, origin, source, by_user)


class TestPropertiesFile:
    def test_it_is_read_as_java_reads_it(self, tmp_path):
        path = tmp_path / "serving.properties"
        path.write_bytes(
            b"#c\n option.model_id = caf\\u00e9/\xe9 \r! no\r\noption.revision:a\\=b\n"
            b"option.dtype\\\n  bf16\noption.n_positions 64\nbatch_size=2\nempty\n"
        )
        assert told(sources.from_properties(path)) == [
            ("model_id", "café/é ", f"{path} line 2"),
            ("revision", "a=b", f"{path} line 4"),
            ("dtype" + "bf16", "", f"{path} line 5"),
            ("n_positions", "64", f"{path} line 7"),
            ("batch_size", "2", f"{path} line 8"),
            ("empty", "", f"{path} line 9"),
        ]

    def test_the_last_of_equal_keys_counts(self, tmp_path):
        (tmp_path / "serving.properties").write_bytes(b"a=1\na=2\n")
        assert told(sources.from_file(tmp_path)) == [
            ("a", "2", f"{tmp_path}/serving.properties line 2")
        ]

    def test_the_mark_of_windows_editors_is_skipped(self, tmp_path):
        (tmp_path / "serving.properties").write_bytes(b"\xef\xbb\xbfoption.n_positions=64")
        assert sources.from_file(tmp_path)[0].name == "n_positions"

    def test_only_the_prefix_addresses_us(self, tmp_path):
        (tmp_path / "serving.properties").write_bytes(b"engine=Python\noption.dtype=bf16")
        assert [(entry.name, entry.by_user) for entry in sources.from_file(tmp_path)] == [
            ("dtype", True),
            ("engine", False),
        ]

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            ("max_dynamic_batch_size=4", "4"),
            ("max_dynamic_batch_size=4\nbatch_size=2", "2"),
            ("batch_size=2", "2"),
        ],
    )
    def test_djls_other_name_for_a_batch(self, tmp_path, lines, expected):
        (tmp_path / "serving.properties").write_text(lines)
        (batch,) = [entry for entry in sources.from_file(tmp_path) if entry.name == "batch_size"]
        assert (batch.value, batch.by_user) == (expected, False)

    @pytest.mark.parametrize(
        ("content", "word"), [(b"a=\\u12", "\\\\ for a backslash"), (b"a=\\uzzzz", "\\uXXXX")]
    )
    def test_a_broken_escape_names_the_file_and_the_fix(self, tmp_path, content, word):
        (tmp_path / "serving.properties").write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            sources.from_file(tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert word in str(caught.value)

    def test_a_folder_needs_no_file_but_a_file_that_is_named_must_be_there(self, tmp_path):
        assert sources.from_file(tmp_path) == []
        with pytest.raises(ConfigError, match=r"mine\.properties' cannot be read"):
            sources.from_properties(tmp_path / "mine.properties")
        (tmp_path / "serving.properties").mkdir()
        with pytest.raises(ConfigError, match="is a folder; expected a file"):
            sources.from_file(tmp_path)

    def test_a_file_has_at_most_a_mebibyte(self, tmp_path):
        path = tmp_path / "serving.properties"
        path.write_bytes(b"a=1\n".ljust(1 << 20, b"#"))
        assert [entry.name for entry in sources.from_file(tmp_path)] == ["a"]
        path.write_bytes(b"a=1\n".ljust((1 << 20) + 1, b"#"))
        with pytest.raises(ConfigError, match="more than 1048576 bytes"):
            sources.from_file(tmp_path)

    def test_a_path_that_no_system_takes_is_an_error_of_ours(self, tmp_path):
        with pytest.raises(ConfigError):
            sources.from_properties(tmp_path / "a\0b")
        assert sources.from_file(tmp_path / "a\0b") == []


class TestVariables:
    def test_names_follow_djl(self):
        environ = {
            "ARGS_BATCH_SIZE": "f",
            "OPTION_ENTRYPOINT": "a",
            "OPTION_ENGINE": "b",
            "OPTION_mpiMode": "c",
            "OPTION_entrypoint": "g",
            "OPTION_N_2": "d",
            "OPTION_": "e",
            "XX": "e",
        }
        settings = [
            *sources.from_option_variables(Inputs(environ), ()),
            *sources.from_argument_variables(Inputs(environ), ()),
        ]
        assert told(settings) == [
            ("entryPoint", "a", "environment OPTION_ENTRYPOINT"),
            ("engine", "b", "environment OPTION_ENGINE"),
            ("mpiMode", "c", "environment OPTION_mpiMode"),
            ("entryPoint", "g", "environment OPTION_entrypoint"),
            ("n_2", "d", "environment OPTION_N_2"),
            ("batch_size", "f", "environment ARGS_BATCH_SIZE"),
        ]
        assert [entry.by_user for entry in settings] == [True] * 5 + [False]

    def test_every_variable_sets_a_name_that_is_known(self):
        known = {*NAMES, "max_rolling_batch_prefill_tokens"}
        for table in (sources.SAGEMAKER, sources.HUB, sources.TGI, sources.TGI_MODEL):
            assert set(table.values()) <= known
        for name in ServingOptions.model_fields:
            given = dict.fromkeys(option(name).env, "x")
            assert {entry.name for entry in sources.from_fallbacks(Inputs(given), ())} <= {name}

    @pytest.mark.parametrize(
        ("value", "added"),
        [
            ("A=1", {"A": "1"}),
            (" A = 1=2 , B= ", {"A": "1=2", "B": ""}),
            ("A,,=", {"": ""}),
            ("C=new", {"C": "new"}),
            ("", {}),
        ],
    )
    def test_the_option_env_is_split_as_java_splits_it(self, value, added):
        environ = {"C": "old"}
        settings = [written("env", value), written("env", "Z=1")]
        variables = sources.worker_variables(settings)
        assert sources.with_worker_variables(environ, variables) == {**environ, **added}
        assert {setting.origin for setting in variables.values()} <= {settings[0].origin}
        assert environ == {"C": "old"}

    def test_sagemakers_other_variables_are_djls(self):
        environ = {
            "SAGEMAKER_STARTUP_TIMEOUT": "1800",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "60",
            "SAGEMAKER_MULTI_MODEL": "2",
        }
        assert told(sources.from_sagemaker(Inputs(environ), ())) == [
            ("model_loading_timeout", "1800", "environment SAGEMAKER_STARTUP_TIMEOUT"),
            ("predict_timeout", "60", "environment SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS"),
        ]

    def test_sagemakers_sizes_are_bytes_and_mebibytes(self):
        environ = {"SAGEMAKER_MAX_REQUEST_SIZE": "1000", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "25"}
        assert told(sources.from_sagemaker(Inputs(environ), ())) == [
            ("max_body_bytes", "1000", "environment SAGEMAKER_MAX_REQUEST_SIZE"),
            ("max_body_bytes", str(25 * 2**20), "environment SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        ]
        none = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "0"}
        ((_, value, _),) = told(sources.from_sagemaker(Inputs(none), ()))
        assert parse_value("max_body_bytes", value) == 2**31 - 1
        odd = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "much"}
        assert told(sources.from_sagemaker(Inputs(odd), ())) == [
            ("max_body_bytes", "much", "environment SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        ]

    def test_tgis_variables_come_where_the_container_puts_them(self):
        environ = {
            "SM_NUM_GPUS": "8",
            "TENSOR_PARALLEL_DEGREE": "4",
            "NEURON_QUANT": "true",
            "HF_MODEL_QUANTIZE": "static_fp8",
        }
        names = [(entry.name, entry.value) for entry in sources.from_fallbacks(Inputs(environ), ())]
        assert names.index(("quantize", "static_fp8")) < names.index(("quantize", "true"))
        assert names.index(("tensor_parallel_degree", "4")) < names.index(
            ("tensor_parallel_degree", "8")
        )


class TestHub:
    ALL: ClassVar = {"HF_MODEL_ID": "org/m", "HF_REVISION": "v1", "HF_TASK": "text-generation"}

    def test_the_three_name_one_model(self, tmp_path):
        settings = sources.from_hub(Inputs(self.ALL, tmp_path), [])
        assert [(entry.name, entry.value) for entry in settings] == [
            ("model_id", "org/m"),
            ("revision", "v1"),
            ("task", "text-generation"),
        ]
        assert not any(entry.unused for entry in settings)

    def test_a_revision_never_goes_to_another_model(self, tmp_path):
        stronger = [written("model_id", "org/other")]
        (tmp_path / "whole").mkdir()
        (tmp_path / "whole/config.json").touch()
        without_id = {**self.ALL, "HF_MODEL_ID": " "}
        for environ, folder, settings, in_djl, word in (
            (self.ALL, tmp_path, stronger, False, "the file"),
            (self.ALL, tmp_path / "whole", [], False, "holds a model"),
            (self.ALL, tmp_path, [], True, "separate model folder"),
            (without_id, tmp_path, stronger, False, "not set"),
        ):
            inputs = Inputs(environ, folder, properties={} if in_djl else None)
            silent = {entry.name: entry.unused for entry in sources.from_hub(inputs, settings)}
            assert set(silent) == {name for name in environ if environ[name].strip()}
            assert all(word in reason for reason in silent.values())

    def test_beside_a_folder_or_uri_djl_takes_the_option(self, tmp_path):
        """A hub id becomes a file, which precedes the option."""
        for place, overruled in (("s3://b/m", True), (str(tmp_path), True), ("org/m", False)):
            environ = {**self.ALL, "HF_MODEL_ID": place, "OPTION_MODEL_ID": "org/other"}
            settings = sources.from_hub(Inputs(environ), [])
            assert [bool(entry.unused) for entry in settings] == [overruled] * 3
            assert all("OPTION_MODEL_ID" in entry.unused for entry in settings if overruled)
            assert not any(one.unused for one in sources.from_hub(Inputs({**self.ALL}), []))

    @pytest.mark.parametrize(
        ("lines", "made"),
        [
            ("option.model_id=org/m\noption.revision=v1", True),
            ("#Sat Nov 21\noption.task=text-generation\noption.model_id=org/m", True),
            ("option.model_id=org/other", False),
            ("option.model_id=org/m\noption.dtype=bf16", False),
            ("option.model_id=org/m\nengine=Python", False),
            ("option.revision=v1", False),
            ("", False),
        ],
    )
    def test_the_file_that_djl_makes_of_them_is_known(self, tmp_path, lines, made):
        (tmp_path / "serving.properties").write_text(lines)
        inputs = Inputs(self.ALL, file=sources.from_file(tmp_path))
        assert sources.written_by_djl(inputs) is made

    def test_its_values_come_from_the_variables(self, tmp_path):
        (tmp_path / "serving.properties").write_text("option.model_id=org/m\noption.revision=v1")
        inputs = Inputs(self.ALL, file=sources.from_file(tmp_path))
        assert sources.from_hub(inputs, ()) == []
        assert told(sources.from_file_options(inputs, ())) == [
            ("model_id", "org/m", "environment HF_MODEL_ID"),
            ("revision", "v1", "environment HF_REVISION"),
        ]


class TestDjl:
    WRITTEN = (
        written("dtype", "bf16", "line 1"),
        written("model_id", "s3://bucket/m", "line 2"),
        written("dtype", "fp32", "environment OPTION_DTYPE"),
    )

    @pytest.mark.parametrize(
        ("name", "value", "origin"),
        [
            ("dtype", "bf16", "line 1"),
            ("dtype", "fp32", "environment OPTION_DTYPE"),
            ("dtype", "fp16", DJL),
            ("device_id", "0", DJL),
            ("model_id", "s3://bucket/m", "line 2"),
            ("model_id", "/opt/djl/download/a1", "line 2, downloaded by DJL"),
            ("dtype", ["bf16"], DJL),
        ],
    )
    def test_a_value_has_the_origin_of_what_was_written(self, name, value, origin):
        assert told(sources.from_djl({name: value}, self.WRITTEN)) == [(name, value, origin)]

    def test_the_users_order_counts_and_not_that_of_javas_map(self):
        properties = {"z": "1", "model_id": "a", "b": "2", "dtype": "c"}
        names = [entry.name for entry in sources.from_djl(properties, self.WRITTEN)]
        assert names == ["dtype", "model_id", "b", "z"]


class TestContent:
    @pytest.mark.parametrize(
        "value", ["true", "False", "no", "1", "None", '{"a": 1}', "{'a': True}", "[1]", {"a": 1}, 3]
    )
    def test_what_is_no_path_stays(self, tmp_path, value):
        assert sources.content(value, tmp_path) == value

    def test_a_path_is_read_from_the_model_folder_or_anywhere(self, tmp_path):
        (tmp_path / "sampling.json").write_text(json.dumps({"top_k": 5}))
        for value in ("sampling.json", "./sampling.json", str(tmp_path / "sampling.json")):
            assert sources.content(value, tmp_path) == {"top_k": 5}

    @pytest.mark.parametrize(
        ("name", "content", "word"),
        [
            ("gone.json", None, "there is no file"),
            ("folder", None, "is a folder; expected a file"),
            ("text.json", b"top_k: 5", "not JSON"),
            ("latin.json", b'"\xe9"', "not JSON"),
            ("deep.json", b"[" * 100_000, "not JSON"),
            ("long.json", b"9" * 5000, "not JSON"),
            ("huge.json", b" " * (1 << 20) + b"1", "more than 1048576 bytes"),
            ("a\0b", None, "a\\x00b"),
            ("/dev/zero", None, "is a pipe, a socket or a device"),
            ("lines.json", b"[" + b"\n" * 2000 + b"1]", "more than 1048576 bytes or 2000 lines"),
            ("x" * 4000, None, "x"),
            ("x" * 5000, None, "at most 4096 characters"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, tmp_path, name, content, word):
        (tmp_path / "folder").mkdir()
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            sources.content(name, tmp_path)
        assert word in str(caught.value)

    def test_text_is_a_template_or_the_path_of_one(self, tmp_path):
        (tmp_path / "chat.jinja").write_text("{{ a }}")
        for value in ("chat.jinja", "{{ a }}"):
            assert sources.content(value, tmp_path, is_text=True) == "{{ a }}"
        assert sources.content("<s>{% if a %}{% endif %}", tmp_path, is_text=True)[:3] == "<s>"
        with pytest.raises(ConfigError, match="there is no file"):
            sources.content("[a]", tmp_path, is_text=True)
        # A byte order mark would be the first character of every prompt.
        (tmp_path / "chat.jinja").write_text("{{ a }}", encoding="utf-8-sig")
        assert sources.content("chat.jinja", tmp_path, is_text=True) == "{{ a }}"
        (tmp_path / "chat.jinja").write_text("{{ a }}", encoding="utf-16")
        with pytest.raises(ConfigError, match=r"chat.jinja' is not UTF-8"):
            sources.content("chat.jinja", tmp_path, is_text=True)

    def test_only_the_operator_names_a_template_elsewhere(self, tmp_path):
        outside, folder = tmp_path / "chat.jinja", tmp_path / "model"
        outside.write_text("{{ a }}")
        folder.mkdir()
        assert sources.content(str(outside), folder, is_text=True) == "{{ a }}"
        (folder / "link.jinja").symlink_to(outside)
        for value in (str(outside), "../chat.jinja", "link.jinja"):
            with pytest.raises(ConfigError, match=r"outside the model's folder|out of the model"):
                sources.content(value, folder, by_operator=False, is_text=True)

    def test_the_largest_file_that_is_allowed(self, tmp_path):
        (tmp_path / "large.json").write_bytes(b"1".rjust(1 << 20))
        assert sources.content("large.json", tmp_path) == 1


def test_javaproperties_and_java_agree_on_what_djl_stores(tmp_path):
    # Java's Properties.store escapes the colon of a URI; the file that DJL makes is such a one.
    path = tmp_path / "serving.properties"
    path.write_text(
        javaproperties.to_comment("made by DJL") + "\noption.model_id=s3\\://bucket/m\n"
    )
    assert told(sources.from_file(tmp_path)) == [("model_id", "s3://bucket/m", f"{path} line 2")]


def test_a_path_inside_a_folder_of_s3():
    for path, uri in (
        (".", "s3://b/a//c"),
        ("./", "s3://b/a//c"),
        ("d/e", "s3://b/a//c/d/e"),
        ("./d//e/", "s3://b/a//c/d/e"),
        ("../d", "s3://b/a//d"),
        ("../../../d", "s3://b/d"),
    ):
        assert sources.inside("s3://b/a//c/", path) == uri
