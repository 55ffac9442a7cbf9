"""Settings of KV offload: sizes as people write them, and what does not go together."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.kv_offload import GIB, OffloadConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.kv_transfers import BlockTransfer, LookupDone, TierLookup, TierReport, TransferDone
from troupellm.protocol.messages.worker import StepPlan, StepResult
from troupellm.server.cli.flags import add_config_flags, load_configs, translate


def parse(*argv: str) -> OffloadConfig:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return load_configs(parser.parse_args(translate(argv)), {})[0].offload


@pytest.mark.parametrize(
    ("given", "size"),
    [(None, 0), (0, 0), (4, 4 * GIB), (0.5, GIB // 2), ("2", 2 * GIB), ("512MiB", 2**29), ("1GB", 10**9)],
)
def test_an_offloading_size_counts_in_gib_or_as_written(given: float | str | None, size: int) -> None:
    config = EngineConfig.from_flat({"kv_offloading_size": given}).offload
    assert config.host_bytes == size
    assert config.on is (size > 0)


@pytest.mark.parametrize("given", ["much", "-1", -1, "nan", "inf", float("nan"), float("inf"), 2**30])
def test_a_wrong_size_is_refused(given: float | str) -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size: .* is no size") as raised:
        EngineConfig.from_flat({"kv_offloading_size": given})
    assert raised.value.param == "kv_offloading_size"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_offload_disk_path", "/somewhere"), ("preemption_mode", "offload"), ("preemption_mode", "swap"),
        ("kv_offloading_backend", "lmcache"), ("kv_offload_disk_bytes", 0), ("kv_offload_timeout", 0.0),
        ("kv_offload_store_threshold", -1),
    ],
)  # fmt: skip
def test_wrong_offload_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        EngineConfig.from_flat({name: value})
    assert raised.value.param == name


NEEDY: dict[str, Any] = {
    "kv_offload_disk_path": "/somewhere",
    "kv_offload_timeout": 2.0,
    "kv_offload_policy": "arc",
    "kv_offload_store_threshold": 2,
    "preemption_mode": "offload",
    "kv_transfer_config": {"kv_connector": "tcp-peer"},
}


@pytest.mark.parametrize("size", [None, 0])
@pytest.mark.parametrize("name", NEEDY)
def test_settings_that_need_host_memory_say_so_without_it(
    name: str, size: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, text = NEEDY[name], f"{name}.* needs kv_offloading_size"
    given = {name: value, "kv_offloading_size": size}
    with pytest.raises(ConfigError, match=text) as raised:
        EngineConfig.from_flat(given)
    assert raised.value.param == name
    with pytest.raises(ConfigError, match=text):
        OffloadConfig(**given)
    written = msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)
    flags = () if size is None else ("--kv-offloading-size", str(size))
    with pytest.raises(ConfigError, match=text):
        parse(*flags, f"--{name.replace('_', '-')}", written)
    file = tmp_path / "troupe.toml"
    line = f'{name} = {{ kv_connector = "tcp-peer" }}' if isinstance(value, dict) else f"{name} = {value!r}"
    file.write_text(f"[offload]\n{line}\n")
    with pytest.raises(ConfigError, match=text):
        parse("--config", str(file))
    EngineConfig.from_flat(given | {"kv_offloading_size": 1})


def test_a_limit_of_no_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_offload_disk_bytes needs kv_offload_disk_path") as raised:
        EngineConfig.from_flat({"kv_offloading_size": 1, "kv_offload_disk_bytes": 1 << 30})
    assert raised.value.param == "kv_offload_disk_bytes"
    with pytest.raises(ConfigError, match="kv_offload_disk_path needs kv_offloading_size"):
        EngineConfig.from_flat({"kv_offload_disk_path": "/somewhere", "kv_offload_disk_bytes": 1 << 30})


def test_a_producer_has_no_policy_for_loads() -> None:
    wanted = {"kv_connector": "tcp-peer", "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}
    with pytest.raises(ConfigError, match="kv_load_failure_policy fail is of no use to a kv_producer"):
        EngineConfig.from_flat({"kv_offloading_size": 1, "kv_transfer_config": wanted})


def test_without_a_prefix_cache_nothing_would_be_found_again() -> None:
    EngineConfig.from_flat({"kv_offloading_size": 1}).check()
    EngineConfig.from_flat({"enable_prefix_caching": False}).check()
    with pytest.raises(ConfigError, match="needs enable_prefix_caching") as raised:
        EngineConfig.from_flat({"kv_offloading_size": 1, "enable_prefix_caching": False}).check()
    assert raised.value.param == "kv_offloading_size"


def test_offload_settings_come_from_flags_and_tables(tmp_path: Path) -> None:
    assert not parse().on
    assert parse("--kv-offloading-size", "4").host_bytes == 4 * GIB
    given = parse(
        "--kv-offloading-size=512MiB",
        "--kv-offload-disk-path",
        "/blocks",
        "--kv-offload-disk-bytes",
        "8GiB",
        "--preemption-mode",
        "offload",
        "--kv-offload-timeout",
        "2",
    )
    assert given == OffloadConfig(
        kv_offloading_size="512MiB",
        kv_offload_disk_path="/blocks",
        kv_offload_disk_bytes=8 * GIB,
        preemption_mode="offload",
        kv_offload_timeout=2.0,
    )
    file = tmp_path / "troupe.toml"
    file.write_text('[offload]\nkv_offloading_size = 2.5\n[kv_transfer_config]\nkv_connector = "shared"\n')
    read = parse("--config", str(file))
    assert read.host_bytes == int(2.5 * GIB)
    assert read.kv_transfer_config == {"kv_connector": "shared"}


def test_plans_and_results_cross_a_process_border() -> None:
    plan = StepPlan(
        step=1,
        engine_epoch=2,
        rows=(),
        epochs=(),
        starts=(),
        counts=(),
        cancelled=(3,),
        transfers=(BlockTransfer(1, "store", 0, 0, 7, 2, b"k"), BlockTransfer(2, "fetch", 1, 1, -1, 3, b"l")),
        lookups=(TierLookup(4, 1, (b"k", b"l")),),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    result = StepResult(
        step=1,
        engine_epoch=2,
        rows=(),
        epochs=(),
        token_counts=(),
        tokens=(),
        transfers=(TransferDone(1, True, seconds=0.5), TransferDone(2, False, "miss")),
        found=(LookupDone(4, 1),),
        tiers=(TierReport(tier=1, disabled="No space left on device", failed=1),),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
