"""The answers to keys of a configuration file that are flags of vLLM."""

import argparse
import re
from pathlib import Path

import pytest

from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED
from troupellm.server.cli.flags import add_config_flags, config_flags, load_configs


def read(file: Path) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return load_configs(parser.parse_args(["--config", str(file)]), {})


@pytest.mark.parametrize("section", ["", "[server]\n"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_model_length = 5", "max_model_length is known from vLLM but not supported here: use max_model_len"),
        ("max-num-active-seqs = 5", "max_num_active_seqs is known from vLLM but not supported here: use max_num_seqs"),
        ("trust_remote_code = 3", "trust_remote_code is known from vLLM but not supported here: remote code is nev"),
        ("no_enable_eplb = true", "no_enable_eplb is known from vLLM but not supported here: one engine drives one de"),
        ("hf_overrides = {a = 1}", "hf_overrides is known from vLLM but not supported here: a model is what its confi"),
        ("compilation_config.mode = 3", "compilation_config is known from vLLM but not supported here: nothing is com"),
        ("'compilation-config.mode' = 3", "compilation_config.mode is known from vLLM but not supported here: nothing"),
        (
            "pipeline_parallel_size = 2",
            "pipeline_parallel_size is known from vLLM but not supported here: one engine dri",
        ),
        ("enable_expert_parallel = true", "enable_expert_parallel is known from vLLM but not supported here: one engi"),
        (
            "guided_decoding_backend = 'xgrammar'",
            "guided_decoding_backend is known from vLLM but not supported here: use guide_backend, ",
        ),
        (
            "structured_outputs_config = {backend = 'xgrammar'}",
            "structured_outputs_config is known from vLLM but not supported here: use guide_backend, ",
        ),
    ],
)
def test_a_flag_of_vllm_in_the_file_is_answered_as_the_flag_is(
    tmp_path: Path, section: str, line: str, message: str
) -> None:
    file = tmp_path / "troupe.toml"
    file.write_text(f"{section}{line}\n")
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert caught.value.message.startswith(f"{file}: {message}")
    assert caught.value.param == message.split()[0]


def test_the_file_may_ask_for_the_one_device_that_there_is(tmp_path: Path) -> None:
    file = tmp_path / "troupe.toml"
    file.write_text("nnodes = 1\nport = 1\n[server]\npipeline-parallel-size = '1'\n")
    assert read(file) == (EngineConfig(), ServerConfig(port=1))


def test_sentences_on_vllms_flags_in_a_file_name_our_keys(tmp_path: Path) -> None:
    file, known = tmp_path / "troupe.toml", {flag.name for flag in config_flags()}
    for name, sentence in (REFUSED | {"guided-decoding-backend": ""}).items():
        file.write_text(f"{name} = 2\n")
        with pytest.raises(ConfigError, match="is known from vLLM") as caught:
            read(file)
        assert "--" not in caught.value.message.removeprefix(str(file))
        used = re.findall(r"--([a-z][a-z-]+)", sentence)
        assert all(word.replace("-", "_") in caught.value.message for word in used)
    named = re.findall(r"\bguide_\w+", caught.value.message)
    assert len(named) == 3
    assert set(named) <= known
