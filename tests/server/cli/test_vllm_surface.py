"""Command lines, files and variables as vLLM's users write them."""

import argparse
import logging
from pathlib import Path

import pytest

from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.config.lora import LoraModule
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.cli.flags import add_config_flags, load_configs, translate
from troupellm.server.cli.main import main


def parse(*argv: str, environment: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return load_configs(parser.parse_args(translate(argv)), environment or {})


@pytest.mark.parametrize(
    "line",
    [
        "-O0", "-O 0", "-O=0", "-cc.mode=0", "-cc.mode NONE", "-tp 1 -pp 1 -dp=1", "--no-enable-lora",
        "--enable-lora=false", "--distributed-executor-backend mp", "--swap-space 0", "--tokenizer-mode auto",
        "--hf-overrides {}", "--quantization None", "--disable-custom-all-reduce", "--uvicorn-log-level info",
        "--compilation-config null", "--no-enable-expert-parallel", "--exclude-tools-when-tool-choice-none",
        "--enable-sleep-mode", "--disable-log-requests", "--response-role assistant",
    ],
)  # fmt: skip
def test_a_flag_that_says_how_it_is_anyway_changes_nothing(line: str) -> None:
    assert parse(*line.split(), "--port", "1") == (EngineConfig(), ServerConfig(port=1))


def test_trusted_remote_code_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("trust-remote-code: true\n")
    with caplog.at_level(logging.WARNING, logger="troupellm.config"):
        assert parse("--trust-remote-code") == parse("--config", str(file)) == parse()
    assert [message.partition(" is ")[0] for message in caplog.messages] == [
        "--trust-remote-code",
        f"{file}: trust_remote_code",
    ]


@pytest.mark.parametrize(
    ("argv", "origins"),
    [
        (["--allowed-origins", '["*"]'], ("*",)),
        (["--allowed-origins", '["a", "b"]', "--allowed-origins", "c"], ("a", "b", "c")),
        (["--allowed-origins", "[not json"], ("[not json",)),
    ],
)
def test_a_json_list_is_its_entries(argv: list[str], origins: tuple[str, ...]) -> None:
    assert parse(*argv)[1].allowed_origins == origins
    assert parse(environment={"TROUPE_ALLOWED_ORIGINS": '["*", "x"]'})[1].allowed_origins == ("*", "x")


def test_variables_of_vllm_count_between_ours_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('log_level = "error"\nlog_stats_interval = 3.0\nkeep_alive_timeout = 3.0\n')
    environment = {
        "VLLM_API_KEY": " a,b ", "VLLM_LOGGING_LEVEL": "WARN", "VLLM_LOG_STATS_INTERVAL": "5",
        "VLLM_BATCH_INVARIANT": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "",
        "TROUPE_LOG_STATS_INTERVAL": "7", "VLLM_USE_V1": "1",
    }  # fmt: skip
    engine, server = parse("--config", str(file), environment=environment)
    assert server.api_key == ("a,b",)
    assert (server.log_level, server.log_stats_interval, server.keep_alive_timeout) == ("warning", 7.0, 3.0)
    assert (engine.worker.batch_invariant, engine.cache.kv_cache_memory_bytes) == (True, 2 * 2**30)
    assert parse("--api-key", "c", environment=environment)[1].api_key == ("c",)
    assert parse(environment={"TROUPE_API_KEY": "d", **environment})[1].api_key == ("d",)
    with pytest.raises(ConfigError, match="^VLLM_CPU_KVCACHE_SPACE: 'much' is not understood"):
        parse(environment={"VLLM_CPU_KVCACHE_SPACE": "much"})
    with pytest.raises(ConfigError, match="^VLLM_LOG_STATS_INTERVAL: 'often' is not understood"):
        parse(environment={"VLLM_LOG_STATS_INTERVAL": "often"})


def test_a_yaml_file_is_read_and_the_command_line_counts_before_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "# as for vLLM\nmodel: m\nport: 12\nmax-model-len: 8k\nserved-model-name: [a, b]\n"
        "enable-prefix-caching: false\n"
        "pipeline-parallel-size: 1\nenable-lora: false\nquantization: null\nhf-overrides: {}\n"
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\nallowed-origins: ['*']\n"
    )
    engine, server = parse("--config", str(file), "--port", "13")
    assert (engine.model.model, engine.model.max_model_len, server.port) == ("m", 8000, 13)
    assert engine.model.served_model_name == ("a", "b")
    assert engine.cache.enable_prefix_caching is False
    assert engine.speculation.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert server.allowed_origins == ("*",)
    file.write_text("")
    assert parse("--config", str(file)) == parse()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: !!python/object/apply:os.system [id]\n", "line 1 has a YAML tag; only plain values are read"),
        ("port: !!int 5\n", "line 1 has a YAML tag"),
        ("a: &x 1\n", "line 1 has a YAML anchor"),
        ("a: 1\nb: *x\n", "line 2 has a YAML alias"),
        ("%YAML 1.1\n---\nport: 1\n", "line 1 has a YAML directive"),
        ("port: 1\nport: 2\n", r"port is given twice (line 2)"),
        ("port: [1\n", "while parsing a flow sequence"),
        ("- 1\n", "must be a mapping of settings"),
        ("1: 2\n", "must be a mapping of settings"),
        ("pipeline-parallel-size: 2\n", "pipeline_parallel_size is known from vLLM but not supported here: one engine"),
        ("port: 70000\n", "port: Expected `int` <= 65535"),
        ("max_num_sequences: 1\n", "unknown setting max_num_sequences; the closest one is max_num_seqs"),
        ("[" * 2000, ""),
    ],
)
def test_errors_of_a_yaml_file_begin_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse("--config", str(file))
    assert caught.value.message.startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--speculative-config.method", "ngram"], {"method": "ngram"}),
        (["-sc.method=ngram", "--speculative_config.num_speculative_tokens=3"],
         {"method": "ngram", "num_speculative_tokens": 3}),
        (["--speculative-config", '{"method": "suffix", "prompt_lookup_max": 4}', "-sc.method", "ngram"],
         {"method": "ngram", "prompt_lookup_max": 4}),
        (["-sc.method=eagle", "-sc.model=m", "-sc.tree-widths+", "2", "-sc.tree-widths+=1"],
         {"method": "eagle", "model": "m", "tree_widths": [2, 1]}),
    ],
)  # fmt: skip
def test_keys_of_an_object_are_flags(argv: list[str], wanted: dict[str, object]) -> None:
    engine, server = parse(*argv, "--port", "1")
    assert engine == EngineConfig.from_flat({"speculative_config": wanted})
    assert server.port == 1


def test_a_key_that_contradicts_another_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="^--pooler-config.a.b contradicts an earlier key of --pooler-config"):
        translate(["--pooler-config.a", "1", "--pooler-config.a.b", "2"])
    with pytest.raises(ConfigError, match="^--pooler-config must be a JSON object"):
        translate(["--pooler-config", "text", "--pooler-config.a", "1"])


@pytest.mark.parametrize(
    ("text", "has", "has_not"),
    [
        ("listgroup", "groups of flags: model, cache, scheduler", "--port"),
        ("ModelConfig", "--dtype", "--port"),
        ("cache", "--block-size", "--dtype"),
        ("Frontend", "--port", "--dtype"),
        ("max-num-seqs", "--max-num-seqs", "--max-num-batched-tokens"),
        ("max_num", "--max-num-batched-tokens", "--port"),
        ("all", "--port", "\0"),
        ("pipeline-parallel-size", "one server per device", "usage"),
        ("zzz", "no flag has 'zzz' in its name", "--port"),
    ],
)
def test_help_shows_what_was_asked_for(text: str, has: str, has_not: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", f"--help={text}"]) == 0
    out = capsys.readouterr().out
    assert has in out
    assert has_not not in out


def test_the_flags_of_adapters_are_those_of_vllm() -> None:
    line = "--enable-lora --lora-modules a=/x b=/y --max-loras 4 --max_lora_rank 64 --max-cpu-loras 9 --lora-dir d"
    engine, _ = parse(*line.split())
    assert engine.lora.modules == (LoraModule("a", "/x"), LoraModule("b", "/y"))
    assert (engine.lora.max_loras, engine.lora.max_lora_rank, engine.lora.host_adapters) == (4, 64, 9)
    assert engine.lora.lora_dir == ("d",)
