import json

import pytest

from troupellm.models.config.generation_config import load_generation_defaults, token_cap
from troupellm.protocol.errors import ConfigError, ModelLoadError


def write(folder, settings):
    (folder / "generation_config.json").write_text(json.dumps(settings))


def test_known_fields_become_sampling_parameters(tmp_path):
    write(tmp_path, {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 99, "do_sample": True})
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 99}
    assert load_generation_defaults(tmp_path, "auto") == expected


def test_missing_files_and_empty_values_are_no_defaults(tmp_path):
    assert load_generation_defaults(tmp_path, "auto") == {}
    write(tmp_path, {"temperature": None, "eos_token_id": 3})
    assert load_generation_defaults(tmp_path, "auto") == {}


def test_mode_vllm_reads_nothing(tmp_path):
    write(tmp_path, {"temperature": 0.6})
    assert load_generation_defaults(tmp_path, "vllm") == {}


def test_another_folder_can_be_named(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write(other, {"min_p": 0.1, "repetition_penalty": 1.1})
    assert load_generation_defaults(tmp_path, str(other)) == {"min_p": 0.1, "repetition_penalty": 1.1}
    with pytest.raises(ModelLoadError, match="generation_config"):
        load_generation_defaults(tmp_path, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"top_p": "high"}, {"max_new_tokens": 1.5}])
def test_a_wrong_value_names_file_and_field(tmp_path, settings):
    write(tmp_path, settings)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: (temperature|top_p|max_tokens)"):
        load_generation_defaults(tmp_path, "auto")


def test_the_operator_overrides_in_every_mode(tmp_path):
    write(tmp_path, {"temperature": 0.6, "top_p": 0.9})
    assert load_generation_defaults(tmp_path, "auto", {"top_p": 0.5}) == {"temperature": 0.6, "top_p": 0.5}
    found = load_generation_defaults(tmp_path, "vllm", '{"max_new_tokens": 7, "skip_special_tokens": false}')
    assert found == {"max_tokens": 7, "skip_special_tokens": False}
    assert token_cap('{"max_new_tokens": 7}') == 7
    assert token_cap(None) is None


@pytest.mark.parametrize("overrides", ["[1]", "{", '{"eos_token_id": 3}', {"temperature": -1}, {"top_p": "high"}])
def test_wrong_overrides_are_named(tmp_path, overrides):
    with pytest.raises(ConfigError, match="override_generation_config"):
        load_generation_defaults(tmp_path, "auto", overrides)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('\ufeff{"top_k": 50.0, "max_new_tokens": 20.0}', {"top_k": 50, "max_tokens": 20}),
        ('{"top_k": 0, "max_new_tokens": 0, "repetition_penalty": 0, "top_p": ""}', {"top_k": 0}),
        ('{"temperature": 0, "penalty_alpha": NaN}', {"temperature": 0}),
    ],
)
def test_a_byte_order_mark_whole_floats_and_values_for_off_are_read(tmp_path, text, expected):
    (tmp_path / "generation_config.json").write_text(text)
    assert load_generation_defaults(tmp_path, "auto") == expected


def test_top_p_0_keeps_the_best_token_alone(tmp_path):
    write(tmp_path, {"top_p": 0})
    top_p = load_generation_defaults(tmp_path, "auto")["top_p"]
    assert 0 < top_p < 1e-6
