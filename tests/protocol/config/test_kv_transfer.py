"""`kv_transfer_config`: vLLM's keys, and what is refused."""

import json
from typing import Any

import pytest

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.kv_connectors import KVTransferConfig, read_transfer_configs
from troupellm.protocol.errors import ConfigError


def test_an_object_a_list_and_their_json_are_the_same() -> None:
    given = {"kv_connector": "tcp-peer", "kv_role": "kv_consumer", "kv_connector_extra_config": {"peers": ["a:1"]}}
    wanted = KVTransferConfig(
        kv_connector="tcp-peer", kv_role="kv_consumer", kv_connector_extra_config={"peers": ["a:1"]}
    )
    assert read_transfer_configs(given) == read_transfer_configs(json.dumps(given)) == (wanted,)
    assert read_transfer_configs([given, given]) == read_transfer_configs(json.dumps([given, given])) == (wanted,) * 2
    assert read_transfer_configs(None) == read_transfer_configs([]) == ()


def test_a_role_says_which_way_blocks_go() -> None:
    roles = {"kv_producer": (True, False), "kv_consumer": (False, True), "kv_both": (True, True)}
    for role, (produces, consumes) in roles.items():
        (config,) = read_transfer_configs({"kv_connector": "x", "kv_role": role})
        assert (config.produces, config.consumes) == (produces, consumes)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("{", "JSON"),
        ("3", "kv_transfer_config"),
        ({}, "kv_connector"),
        ({"kv_connector": 3}, "kv_connector"),
        ({"kv_connector": "x", "kv_role": "both"}, "kv_role"),
        ({"kv_connector": "x", "kv_load_failure_policy": "ignore"}, "kv_load_failure_policy"),
        ({"kv_connector": "x", "kv_connector_extra_config": []}, "kv_connector_extra_config"),
        ({"kv_connector": "x", "kv_ip": "1.2.3.4"}, "kv_ip"),
        ({"kv_connector": "x", "kv_parallel_size": 2}, "kv_parallel_size"),
        ({"kv_connector": "x", "kv_conector": "y"}, "kv_conector"),
        ([{"kv_connector": "x"}] * 9, "at most 8"),
    ],
)
def test_a_wrong_kv_transfer_config_is_refused_by_name(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        read_transfer_configs(given)
    assert (raised.value.param or "").startswith("kv_transfer_config")


@pytest.mark.parametrize(("role", "loads"), [("kv_producer", False), ("kv_consumer", True), ("kv_both", True)])
def test_only_a_connector_that_loads_blocks_may_fail_their_requests(role: str, loads: bool) -> None:
    given = {"kv_connector": "x", "kv_role": role, "kv_load_failure_policy": "fail"}
    if loads:
        assert read_transfer_configs(given)[0].kv_load_failure_policy == "fail"
    else:
        with pytest.raises(ConfigError, match="of no use to a kv_producer"):
            read_transfer_configs(given)


def test_a_connector_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match="kv_offloading_size") as raised:
        EngineConfig.from_flat({"kv_transfer_config": {"kv_connector": "tcp-peer"}})
    assert raised.value.param == "kv_transfer_config"
    settings = {"kv_transfer_config": [{"kv_connector": "tcp-peer"}], "kv_offloading_size": 1}
    assert EngineConfig.from_flat(settings).offload.on
