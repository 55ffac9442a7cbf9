"""`EngineArgs` and the parser of vLLM's scripts."""

import argparse
import dataclasses

import pytest

from troupellm import AsyncEngineArgs, EngineArgs, EngineConfig, FlexibleArgumentParser
from troupellm.protocol.errors import ConfigError


def parsed(*argv: str) -> argparse.Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="m", runner="pooling")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--spec-tokens", type=int, default=3)  # a name of vLLM's own, which the script takes
    parsed_args: argparse.Namespace = parser.parse_args(argv)
    return parsed_args


def test_nothing_given_is_the_defaults() -> None:
    assert EngineArgs().create_engine_config() == EngineConfig()
    assert AsyncEngineArgs(model="m").create_engine_config() == EngineConfig.from_flat({"model": "m"})
    assert EngineArgs().tensor_parallel_size == 1


def test_flags_reach_the_configuration() -> None:
    args = parsed(
        "--max_model_len",
        "8k",
        "-tp",
        "1",
        "-O0",
        "--no-enable-prefix-caching",
        "--served-model-name",
        "a",
        "b",
        "--speculative-config.method",
        "ngram",
        "--trust-remote-code",
        "--max-tokens",
        "7",
        "--dtype=bfloat16",
        "--gpu-memory-utilization",
        "0.5",
        "--quantization",
        "None",
    )
    assert (args.max_tokens, args.spec_tokens, args.model, args.runner) == (7, 3, "m", "pooling")
    assert (args.tensor_parallel_size, args.max_model_len, args.dtype) == (1, 8000, "bfloat16")
    wanted = EngineConfig.from_flat(
        {
            "model": "m",
            "runner": "pooling",
            "max_model_len": 8000,
            "enable_prefix_caching": False,
            "served_model_name": ("a", "b"),
            "speculative_config": {"method": "ngram"},
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.5,
        }
    )
    args.spec_tokens = None  # the script's own
    assert EngineArgs.from_cli_args(args).create_engine_config() == wanted
    settings = vars(args)
    settings.pop("max_tokens")
    assert EngineConfig.from_flat(settings) == wanted


def test_a_group_of_a_parser_takes_the_flags_too() -> None:
    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="m")
    assert parser.parse_args(["--max-num-seqs", "4"]).max_num_seqs == 4
    assert AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(), async_args_only=True).parse_args([]) is not None


def test_unsupported_engine_args_are_refused_when_the_configuration_is_made() -> None:
    args = EngineArgs.from_cli_args(parsed("-pp", "2"))
    with pytest.raises(ConfigError, match="^pipeline_parallel_size is known from vLLM .*one server per device"):
        args.create_engine_config()
    args.pipeline_parallel_size, args.spec_tokens = 1, None
    assert args.create_engine_config().model.model == "m"
    args.max_num_seqs = 0
    with pytest.raises(ConfigError, match="^max_num_seqs"):
        args.create_engine_config()
    with pytest.raises(TypeError, match="frog"):
        EngineArgs(frog=1)


def test_a_wrong_word_is_an_error_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--max-num-seqs", "many")
    assert "max_num_seqs: 'many' is not understood" in capsys.readouterr().err


def test_engine_args_are_a_dataclass() -> None:
    args = EngineArgs(model="m", max_num_seqs=4)
    assert dataclasses.asdict(args)["max_num_seqs"] == 4
    assert EngineArgs(**dataclasses.asdict(args)) == args


def test_a_script_declares_flags_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--my_flag")
    parser.add_argument("-tp", type=int)
    args = parser.parse_args(["--my_flag=a_b", "-tp", "3"])
    assert (args.my_flag, args.tp) == ("a_b", 3)
