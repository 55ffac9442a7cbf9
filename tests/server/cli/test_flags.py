"""The command line is made from the configuration Structs: every field has a flag, a variable and a TOML key."""

import argparse
import re
from pathlib import Path

import pytest

from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.config.sizes import human_int
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED, SHORT
from troupellm.server.cli.flags import add_config_flags, config_flags, load_configs, translate
from troupellm.server.cli.main import main
from troupellm.server.cli.unknown_flags import unknown
from troupellm.server.host.server_state import STREAM_DEFAULTS, stream_defaults


def parse(*argv: str, environment: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return load_configs(parser.parse_args(translate(argv)), environment or {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096), ("8k", 8000), ("8K", 8192), ("1M", 2**20), ("1m", 10**6), ("4GiB", 4 * 2**30),
        ("2GB", 2 * 10**9),
        ("1.5K", 1536), ("512MiB", 512 * 2**20), ("2gib", 2 * 2**30),
    ],
)  # fmt: skip
def test_a_size_with_a_unit_is_read_as_its_bytes(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "4 apples", "1.0001k5", "0.0001k", "-"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal for int|is no whole number"):
        human_int(text)


def test_flags_reach_their_sections() -> None:
    engine, server = parse(
        "--max-model-len",
        "8k",
        "--kv_cache_memory_bytes=4GiB",
        "--no-enable-prefix-caching",
        "--dtype",
        "bfloat16",
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--port",
        "0",
        "--flush-interval",
        "0.5",
    )
    assert engine.model.max_model_len == 8000
    assert engine.model.dtype == "bfloat16"
    assert engine.cache.kv_cache_memory_bytes == 4 * 2**30
    assert engine.cache.enable_prefix_caching is False
    assert engine.stream.flush_interval == 0.5
    assert server.api_key == ("a", "b")
    assert server.port == 0


def test_nothing_given_is_the_defaults() -> None:
    assert parse() == (EngineConfig(), ServerConfig())


def test_a_list_of_numbers_is_one_wherever_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "troupe.toml"
    file.write_text("cudagraph_capture_sizes = [1, 8, 32]\n")
    for engine, _ in (
        parse("--cudagraph-capture-sizes", "1", "8", "32"),
        parse(environment={"TROUPE_CUDAGRAPH_CAPTURE_SIZES": "1, 8, 32"}),
        parse("--config", str(file)),
    ):
        assert engine.worker.cudagraph_capture_sizes == (1, 8, 32)
    with pytest.raises(ConfigError, match="^cudagraph_capture_sizes: 'model' is not understood"):
        parse("--cudagraph-capture-sizes", "8", "model")
    with pytest.raises(ConfigError, match=r"^cudagraph_capture_sizes\[0\]: Expected `int` >= 1"):
        parse("--cudagraph-capture-sizes", "0")


def test_one_of_a_few_numbers_is_one_wherever_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "troupe.toml"
    file.write_text("[server]\noverload_status = 503\n")
    assert parse()[1].overload_status == 429
    for _, server in (
        parse("--overload-status", "503"),
        parse(environment={"TROUPE_OVERLOAD_STATUS": "503"}),
        parse("--config", str(file)),
    ):
        assert server.overload_status == 503
    with pytest.raises(SystemExit):
        parse("--overload-status", "500")
    assert "--overload-status: invalid choice" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^TROUPE_OVERLOAD_STATUS: Invalid enum value 500 \(allowed: 429, 503\)$"):
        parse(environment={"TROUPE_OVERLOAD_STATUS": "500"})
    with pytest.raises(ConfigError, match="^TROUPE_OVERLOAD_STATUS: 'full' is not understood$"):
        parse(environment={"TROUPE_OVERLOAD_STATUS": "full"})


def test_auto_and_minus_one_are_the_same_context() -> None:
    assert parse("--max-model-len", "auto") == parse("--max-model-len", "-1")


@pytest.mark.parametrize("name", ["port", "max-num-seqs", "api-server-count", "kv-cache-memory-bytes"])
def test_minus_one_is_no_other_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name.replace('-', '_')}: Expected `int.* >= [01]"):
        parse(f"--{name}", "-1")
    with pytest.raises(ConfigError, match=f"^{name.replace('-', '_')}: 'auto' is not understood"):
        parse(f"--{name}", "auto")


def test_precedence_is_flag_then_environment_then_file(tmp_path: Path) -> None:
    file = tmp_path / "troupe.toml"
    file.write_text('max-num-seqs = 1\nport = 1\nblock_size = 8\n[model]\nserved_model_name = ["x", "y"]\n')
    environment = {"TROUPE_MAX_NUM_SEQS": "2", "TROUPE_PORT": "2", "TROUPE_API_KEY": "k1,k2"}
    engine, server = parse("--config", str(file), "--port", "3", environment=environment)
    assert (engine.cache.block_size, engine.scheduler.max_num_seqs, server.port) == (8, 2, 3)
    assert engine.model.served_model_name == ("x", "y")
    assert server.api_key == ("k1", "k2")


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-seqs", "many"], "max_num_seqs"),
        (["--port", "70000"], "port"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
    ],
)
def test_a_wrong_value_names_its_setting(argv: list[str], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert caught.value.param == name


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "troupe.toml"
    file.write_text("max_num_sequences = 1\n")
    with pytest.raises(ConfigError, match="unknown setting max_num_sequences; the closest one is max_num_seqs$"):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[servr]\nport = 1\n", "unknown section servr; there are cache, guide, leases, lora, media, model, "),
        ("[cache]\nport = 1\n", "port belongs to the section server, not to cache"),
        ("port = 1\n[server]\nport = 2\n", "port is given twice"),
        ("max-num-seqs = 1\nmax_num_seqs = 2\n", "max_num_seqs is given twice"),
        ("[server.sub]\nport = 1\n", "unknown setting sub"),
        ("server = 1\n", "unknown setting server"),
        ("port = \n", "Invalid value (at line 1, column 8)"),
        ("port = 70000\n", "port: Expected `int` <= 65535"),
        ("[server]\nport = 'x'\n", "port: 'x' is not understood"),
        ("api_key = [1]\n", "api_key[0]: Expected `str`, got `int`"),
        ("model = '\xff'\n", "'utf-8' codec can't decode byte 0xff in position 9: invalid start byte"),
    ],
)
def test_errors_of_a_config_file_begin_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "troupe.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        parse("--config", str(file))
    assert caught.value.message.startswith(f"{file}: {message}")


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}: Is a directory$"):
        parse("--config", str(tmp_path))


def test_every_length_may_be_minus_one_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "troupe.toml"
    file.write_text("max_model_len = -1\n")
    assert parse("--config", str(file)) == parse()


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="^TROUPE_PORT: Expected `int` <= 65535$"):
        parse(environment={"TROUPE_PORT": "70000"})
    with pytest.raises(ConfigError, match="^TROUPE_SPECULATIVE_CONFIG is not JSON"):
        parse(environment={"TROUPE_SPECULATIVE_CONFIG": "{"})


def test_a_flag_of_vllm_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match="known from vLLM but not supported here: .*one server per device"):
        translate(["--pipeline_parallel_size", "2"])


def test_the_one_device_that_there_is_may_be_asked_for() -> None:
    assert translate(["-pp", "1", "--nnodes=1", "--port", "1"]) == ["--port", "1"]


def test_the_ranks_of_a_model_have_vllms_flag() -> None:
    engine, _ = parse("-tp", "2", "--distributed-timeout-seconds", "9")
    assert (engine.parallel.tensor_parallel_size, engine.parallel.distributed_timeout_seconds) == (2, 9.0)
    assert translate(["-tp", "2"]) == ["--tensor-parallel-size", "2"]


@pytest.mark.parametrize("words", [("--limit-mm-per-prompt", '{"image": 3}'), ("--limit-mm-per-prompt.image", "3")])
def test_objects_are_given_as_json_or_by_key(words: tuple[str, ...]) -> None:
    assert parse(*words)[0].media.limit_mm_per_prompt == {"image": 3}
    assert parse(environment={"TROUPE_MM_PROCESSOR_KWARGS": '{"size": 9}'})[0].media.mm_processor_kwargs == {"size": 9}


@pytest.mark.parametrize("value", ["{", "3", '{"image": "x"}'])
def test_a_wrong_object_is_refused_with_the_flags_name(value: str) -> None:
    with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
        parse("--limit-mm-per-prompt", value)


def test_short_habits_and_spelt_out_booleans() -> None:
    engine, _ = parse("-c", "8k", "-np", "4", "--enable-prefix-caching=false")
    assert (engine.model.max_model_len, engine.scheduler.max_num_seqs) == (8000, 4)
    assert engine.cache.enable_prefix_caching is False


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_an_empty_variable_is_no_key(text: str) -> None:
    assert parse(environment={"TROUPE_API_KEY": text})[1].api_key == ()


def test_keys_in_the_variable_are_stripped() -> None:
    assert parse(environment={"TROUPE_API_KEY": "a, b,"})[1].api_key == ("a", "b")


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key"])
def test_several_words_before_the_model_are_ambiguous(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", flag, "a", "/no/such/model"]) == 2
    assert f"name the model before {flag}, or with --model" in capsys.readouterr().err
    assert main(["serve", "/no/such/model", flag, "a", "b"]) == 3
    assert "/no/such/model" in capsys.readouterr().err


def test_one_flag_takes_several_keys() -> None:
    assert parse("--api-key", "a", "b", "--api-key=[c]")[1].api_key == ("a", "b", "[c]")


def test_a_cache_without_room_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--kv-cache-memory-bytes", "1kB"]) == 2
    assert "no room for one KV block" in capsys.readouterr().err


def test_the_table_of_missing_flags_names_none_that_we_have() -> None:
    assert not {flag.option.removeprefix("--") for flag in config_flags()} & set(REFUSED)


def test_sentences_on_missing_flags_name_our_flags() -> None:
    named = {name for sentence in REFUSED.values() for name in re.findall(r"--[a-z][a-z-]+", sentence)}
    assert len(named) > 10
    assert named <= {flag.option for flag in config_flags()}
    assert "--cudagraph-capture-sizes" in REFUSED["cuda-graph-sizes"]


def test_a_short_flag_stands_for_one_that_is_there_or_refused_by_name() -> None:
    known = {flag.option for flag in config_flags()} | {f"--{name}" for name in REFUSED}
    assert set(SHORT.values()) <= known


def test_each_sentence_comes_with_its_flag() -> None:
    for name, sentence in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            translate([f"--{name}=7"])
        assert caught.value.message == f"--{name} is known from vLLM but not supported here: {sentence}"
        assert caught.value.param == f"--{name}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hf_overrides", '{"rope_theta": 1}'], "^--hf-overrides is known from vLLM .*config.json"),
        (["--no-log-error-stack"], "^--no-log-error-stack is known from vLLM "),
        (["-O3"], "^--compilation-config is known from vLLM .*nothing is compiled"),
        (["-cc.mode=3"], "^--compilation-config.mode is known from vLLM "),
        (["--compilation-config.pass_config.fuse_norm", "true"], "is known from vLLM .*nothing is compiled"),
        (["--nnodes=2"], "one server per device"),
        (["--data-parallel-start-rank", "1"], "^--data-parallel-start-rank is known from vLLM "),
        (["--speculative-model", "m"], "use --speculative-config$"),
        (["--cudagraph-capture-sizes.a", "1"], "^--cudagraph-capture-sizes.a .* its whole value, as one JSON object"),
    ],
)
def test_flags_of_vllm_are_recognised_in_every_spelling(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(argv)


def test_a_word_that_is_no_flag_may_be_called_like_one() -> None:
    words = ["--served-model-name", "watermark", "grpc", "--port", "1", "middleware"]
    assert translate(words) == words


@pytest.mark.parametrize(
    ("line", "given", "closest"),
    [
        ("serve --max-num-sequences 4", "--max-num-sequences", "--max-num-seqs"),
        ("serve m --no-enable-prefix-cache=x", "--no-enable-prefix-cache", "--no-enable-prefix-caching"),
        ("run-batch -i - -o - --max-flight 4", "--max-flight", "--max-inflight"),
        ("complete --maximum-tokens 4", "--maximum-tokens", "--max-tokens"),
        ("serve --max-num-seq 4", "--max-num-seq", "--max-num-seqs"),
        ("serve m --no-enable-prefix-cachin", "--no-enable-prefix-cachin", "--no-enable-prefix-caching"),
        ("run-batch -i - -o - --overwrit", "--overwrit", "--overwrite"),
        ("chat --system-promp x", "--system-promp", "--system-prompt"),
        ("complete --max-token 4", "--max-token", "--max-tokens"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_closest_one(
    line: str, given: str, closest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split()
    assert main(words) == 2
    wanted = f"troupellm: {given} is no flag of troupellm {words[0]}; the closest one is {closest}\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --zzz", "--zzz is no flag of troupellm serve; troupellm serve --help lists them"),
        ("--zzz serve", "--zzz is no flag of troupellm; troupellm --help lists them"),
        ("serve one two", "unrecognized arguments: two"),
    ],
)
def test_flags_like_no_other_are_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err == f"troupellm: {message}\n"


def test_the_closest_flag_is_one_of_the_command_that_was_named() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for name, option in (("serve", "--request-rate"), ("sweep", "--requests-rates")):
        commands.add_parser(name).add_argument(option)
    error = unknown(["--requests-rate", "4"], parser, ["serve", "--requests-rate", "4"])
    assert error.message == "--requests-rate is no flag of troupellm serve; the closest one is --request-rate"
    assert error.param == "--requests-rate"


def test_every_flag_has_a_help_text() -> None:
    assert [flag.name for flag in config_flags() if not flag.help] == []


def test_help_shows_defaults_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("usage: troupellm serve [options] [MODEL] ")
    for part in ("(default: 8MiB)", "(default: 10GiB)", "(default: GET POST DELETE)", "(default: on)"):
        assert part in out
    for wrong in ("(default: (", "(default: True)", "SDKs send) (default:"):
        assert wrong not in out


def test_a_wrong_choice_does_not_bury_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--dtype", "float8"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_an_interval_that_was_chosen_is_kept_however_few_streams_there_are() -> None:
    assert stream_defaults([]) == STREAM_DEFAULTS
    assert set(stream_defaults(["flush_interval"])) == {"stall_timeout"}
    assert set(stream_defaults(["stall_timeout"])) == {"flush_interval", "wakes_per_second", "most_wakes_per_second"}
    assert stream_defaults([], api_processes=3)["most_wakes_per_second"] == 3 * STREAM_DEFAULTS["most_wakes_per_second"]
    assert EngineConfig.from_flat({}).stream.wakes_per_second is None


def test_speculation_is_json_or_a_table(tmp_path: Path) -> None:
    wanted = EngineConfig.from_flat({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}})
    assert wanted.speculation.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert parse("--speculative-config", text)[0] == wanted
    assert parse(f"-sc={text}")[0] == wanted
    assert parse(environment={"TROUPE_SPECULATIVE_CONFIG": text})[0] == wanted
    assert parse("--speculative-config", "null") == parse("--speculative-config", "none") == parse()
    file = tmp_path / "troupe.toml"
    table = 'method = "ngram"\nnum_speculative_tokens = 3\n'
    for heading in ("[speculative_config]", "[speculation.speculative_config]"):
        file.write_text(f"{heading}\n{table}")
        assert parse("--config", str(file))[0] == wanted, heading
    with pytest.raises(ConfigError, match="num_speculative_tokens is wrong") as caught:
        parse("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 1000}')
    assert caught.value.param == "speculative_config.num_speculative_tokens"
