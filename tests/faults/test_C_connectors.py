"""Row C8 of the fault table, for stores that other engines share: no behaviour of a peer or a folder makes a token
wrong.

A block that does not come is computed, or fails its request with an error that names the connector, as the policy says.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm import Engine
from troupellm.protocol.errors import KVLoadFailed
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.kv.hostile_peer import (
    HostilePeer,
    Ill,
    babbles,
    dies,
    flips,
    lies,
    stalls,
    swaps,
    vanishes,
)
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.processes import free_port, ready_process
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio

PROMPT = [3 + number * 7 % 250 for number in range(200)]
BLOCKS = len(PROMPT) // 16
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
ILLNESSES = [dies, flips, swaps, lies, stalls, babbles, vanishes]


def settings(tmp_path: Path, connector: str, role: str, options: dict[str, Any], policy: str) -> dict[str, Any]:
    transfer = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": options,
    }
    return {
        "kv_offloading_size": "8MiB",
        "kv_offload_timeout": 0.5,
        "prefix_hash_secret_file": str(tmp_path / "secret"),
        "kv_transfer_config": transfer,
        "preemption_mode": "offload",
    }


def folder_settings(tmp_path: Path, role: str, policy: str = "recompute") -> dict[str, Any]:
    return settings(tmp_path, "shared-directory", role, {"path": str(tmp_path / "blocks")}, policy)


def tier_of(engine: Any) -> Any:
    return engine.snapshot().scheduler.offload.tiers[1]


@pytest.fixture
async def solo(tiny_engine: Any, tmp_path: Path) -> tuple[int, ...]:
    """The model's tokens, from an engine that leaves its blocks in a folder."""
    async with tiny_engine(**folder_settings(tmp_path, "kv_producer")) as engine:
        completion = await engine.generate(PROMPT, **GREEDY)
        await eventually(lambda: tier_of(engine).stores >= BLOCKS)
        tokens: tuple[int, ...] = tuple(completion.token_ids)
        return tokens


async def ask_peer(tiny_engine: Any, tmp_path: Path, ill: Ill | None, policy: str, seen: list[Any]) -> Any:
    with HostilePeer(tmp_path / "blocks", tmp_path / "secret", ill) as peer:
        given = settings(tmp_path, "tcp-peer", "kv_consumer", {"peers": [peer.address]}, policy)
        async with tiny_engine(**given) as engine:
            try:
                return await engine.generate(PROMPT, **GREEDY)
            finally:
                await eventually(lambda: not engine.snapshot().scheduler.offload.transfers)
                seen.append((tier_of(engine), engine.snapshot().scheduler, peer.num_asked))


async def test_C8_a_peer_in_good_health_is_believed(tiny_engine: Any, tmp_path: Path, solo: tuple[int, ...]) -> None:
    seen: list[Any] = []
    completion = await ask_peer(tiny_engine, tmp_path, None, "fail", seen)
    assert tuple(completion.token_ids) == solo
    assert completion.usage.cached_sources.external == 16 * BLOCKS
    ((tier, _, asked),) = seen
    assert (asked, tier.loads, tier.failures, tier.corrupt, tier.disabled) == (BLOCKS, BLOCKS, 0, 0, "")


async def test_C8_the_next_engine_finds_what_the_last_one_left_unless_anything_differs(
    tiny_engine: Any, checkpoint: Path, tmp_path: Path, solo: tuple[int, ...]
) -> None:
    """Keys survive a restart with the secret; other weights, settings and secrets have none in common."""
    given = folder_settings(tmp_path, "kv_both")
    async with tiny_engine(**given) as engine:
        completion = await engine.generate(PROMPT, **GREEDY)
        assert tuple(completion.token_ids) == solo
        assert completion.usage.cached_sources.external == 16 * BLOCKS
    same, other = str(checkpoint), str(write_tiny_model(tmp_path / "other", seed=1))
    secret = {"prefix_hash_secret_file": str(tmp_path / "another secret")}
    for model, different, hidden in (
        (other, {}, {}),
        (same, {"kv_cache_dtype": "int8"}, {}),
        (same, {"quantization": "int8"}, {}),
        (same, {}, secret),
    ):
        alone = Engine(model, **(SETTINGS | different))
        reader = Engine(model, **(SETTINGS | given | different | hidden))
        async with alone, reader:
            wanted = await alone.generate(PROMPT, **GREEDY)
            got = await reader.generate(PROMPT, **GREEDY)
            assert got.usage.cached_sources.external == 0, (model, different)
            assert got.token_ids == wanted.token_ids


@pytest.mark.parametrize("ill", ILLNESSES)
async def test_C8_blocks_that_a_sick_peer_does_not_give_are_computed(
    tiny_engine: Any, tmp_path: Path, solo: tuple[int, ...], ill: Ill
) -> None:
    seen: list[Any] = []
    with anyio.fail_after(60):
        completion = await ask_peer(tiny_engine, tmp_path, ill, "recompute", seen)
    assert tuple(completion.token_ids) == solo
    assert completion.usage.cached_sources.external == 0
    ((tier, scheduler, asked),) = seen
    assert asked > 0
    assert tier.failures + tier.misses + tier.corrupt > 0
    assert (scheduler.running, scheduler.waiting, scheduler.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("ill", ILLNESSES)
async def test_C8_a_sick_peer_fails_the_request_if_that_is_the_policy(
    tiny_engine: Any, tmp_path: Path, solo: tuple[int, ...], ill: Ill
) -> None:
    seen: list[Any] = []
    with anyio.fail_after(60), pytest.raises(KVLoadFailed, match="tcp-peer"):
        await ask_peer(tiny_engine, tmp_path, ill, "fail", seen)
    ((_, scheduler, asked),) = seen
    assert asked > 0
    assert (scheduler.running, scheduler.waiting, scheduler.blocks_used) == (0, 0, 0)


async def test_C8_a_damaged_shared_folder_beside_canaries(
    tiny_engine: Any, tmp_path: Path, solo: tuple[int, ...]
) -> None:
    files = sorted((tmp_path / "blocks").rglob("*.kv"))
    assert len(files) >= BLOCKS
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        content[number * len(content) // len(files)] ^= 1
        path.write_bytes(content)
    request = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True} | GREEDY
    consumer = tiny_engine(**folder_settings(tmp_path, "kv_consumer", "fail"))
    async with consumer as engine, under_attack(engine, canary_tokens=40) as attacked:
        refused = await attacked.client.post("/v1/completions", json=request)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "kv_load_failed")
        assert "shared-directory" in refused.json()["error"]["message"]
        assert tier_of(engine).corrupt > 0
        for path in files:
            path.unlink(missing_ok=True)
        answer = await attacked.client.post("/v1/completions", json=request)
        assert tuple(answer.json()["choices"][0]["token_ids"]) == solo


@pytest.mark.slow
@pytest.mark.parametrize("ill", ILLNESSES)
async def test_C8_canaries_do_not_notice_a_sick_peer(
    tiny_engine: Any, tmp_path: Path, solo: tuple[int, ...], ill: Ill
) -> None:
    request = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True} | GREEDY
    with HostilePeer(tmp_path / "blocks", tmp_path / "secret", ill) as peer:
        given = settings(tmp_path, "tcp-peer", "kv_consumer", {"peers": [peer.address]}, "recompute")
        async with tiny_engine(**given) as engine, under_attack(engine, canary_tokens=40) as attacked:
            for number in range(8):
                body = request | {"prompt": [*PROMPT[: 16 * (number + 1)], 5]}
                assert (await attacked.client.post("/v1/completions", json=body)).status_code == 200
            answer = await attacked.client.post("/v1/completions", json=request)
            assert tuple(answer.json()["choices"][0]["token_ids"]) == solo


@pytest.mark.slow
async def test_C8_the_engine_that_prefills_loses_its_worker(checkpoint: Path, tmp_path: Path) -> None:
    """Two servers, as in the README: blocks are handed over, computed while no peer serves them, handed over again."""
    port = free_port()
    shared = ("--kv-offloading-size", "8MiB", "--preemption-mode", "offload", "--kv-offload-timeout", "10")
    shared += ("--no-spare-worker", "--prefix-hash-secret-file", str(tmp_path / "secret"), "--kv-transfer-config")
    one = {"kv_connector": "tcp-peer", "kv_role": "kv_producer", "kv_connector_extra_config": {"listen": port}}
    two = {"kv_connector": "tcp-peer", "kv_role": "kv_consumer", "kv_connector_extra_config": {"peers": [f":{port}"]}}
    async with (
        ready_process(checkpoint, *shared, json.dumps(one)) as prefill,
        ready_process(checkpoint, *shared, json.dumps(two)) as decode,
        prefill.client() as first,
        decode.client() as second,
    ):

        async def handed_over(salt: int) -> int:
            """Of a new prompt; its answer is the same on both."""
            request = {"model": "tiny", "prompt": [3 + salt, *PROMPT], "return_token_ids": True} | GREEDY
            assert (await first.post("/v1/completions", json=request | {"max_tokens": 1})).status_code == 200
            answers = [(await client.post("/v1/completions", json=request)).json() for client in (second, first)]
            one, two = (answer["choices"][0]["token_ids"] for answer in answers)
            assert one == two
            return int(answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"])

        async def until_handed_over(salt: int) -> None:
            with anyio.fail_after(100):
                while await handed_over(salt) < 16 * BLOCKS:
                    salt += 1

        await until_handed_over(0)
        (before,) = prefill.workers()
        os.kill(before, signal.SIGKILL)
        alone = {"model": "tiny", "prompt": [200, *PROMPT], "return_token_ids": True} | GREEDY
        computed = (await second.post("/v1/completions", json=alone)).json()
        same = (await first.post("/v1/completions", json=alone)).json()
        assert computed["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]
        await until_handed_over(20)
        assert prefill.workers() != [before]
