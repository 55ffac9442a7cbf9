"""vLLM's flags for structured outputs."""

import argparse

import pytest

from troupellm.protocol.config.structured_outputs import GuideConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.cli.flags import add_config_flags, load_configs, translate


def parse(*argv: str) -> GuideConfig:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return load_configs(parser.parse_args(translate(argv)), {})[0].guide


@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        (("--structured-outputs-config", '{"backend": "xgrammar"}'), {"guide_backend": "xgrammar"}),
        (('--structured-outputs-config={"disable_any_whitespace": true}',), {"guide_any_whitespace": False}),
        (("--structured_outputs_config.backend", "guidance"), {"guide_backend": "guidance"}),
        (("--structured-outputs-config.disable_additional_properties=true",), {"guide_additional_properties": False}),
        (("--structured-outputs-config", '{"disable_fallback": true}', "--max-num-seqs", "3"), {}),
        (("--guided-decoding-backend", "auto"), {}),
        (
            ("--guided-decoding-backend=guidance:disable-any-whitespace,no-fallback",),
            {"guide_backend": "guidance", "guide_any_whitespace": False},
        ),
        (("--guided-decoding-disable-any-whitespace",), {"guide_any_whitespace": False}),
        (("--guide-backends", "guidance"), {"guide_backends": ("guidance",)}),
        (("--guide-timeout", "2.5", "--guide-cache-bytes", "1MiB"), {"guide_timeout": 2.5, "guide_cache_bytes": 2**20}),
    ],
)
def test_a_guide_flag_of_vllm_sets_our_guide_config(argv, settings):
    assert parse(*argv) == GuideConfig(**settings)


@pytest.mark.parametrize(
    "argv",
    [
        ("--structured-outputs-config", "xgrammar"),
        ("--structured-outputs-config", '{"backend": 5}'),
        ("--structured-outputs-config", '{"frog": true}'),
        ("--structured-outputs-config", '{"enable_in_reasoning": true}'),
        ("--structured-outputs-config",),
    ],
)
def test_a_wrong_structured_outputs_config_is_refused(argv):
    with pytest.raises(ConfigError) as refused:
        parse(*argv)
    assert refused.value.param == "--structured-outputs-config"
