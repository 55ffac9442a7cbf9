"""Row C8 of the fault table, for installed plug-in stores: a bad plug-in costs time, never a token.

It is found by its entry point, as an engine finds it. A block that does not come is computed, or fails its request, as
the policy says.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.models.kv_connectors.open_connectors import GROUP
from troupellm.protocol.errors import KVLoadFailed
from troupellm.tests.support.kv.toy_connector import ILL_BEFORE, ILL_WHEN_READ, OPENED_BY, RELEASED
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio

PROMPT = [3 + number * 7 % 250 for number in range(200)]
BLOCKS = len(PROMPT) // 16
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
ILL = [*ILL_WHEN_READ, *ILL_BEFORE]
PATIENT, IMPATIENT = 30.0, 0.5
"""Seconds that a store may take for one block."""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    info = tmp_path / "installed" / "toy_connector-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-connector\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntoy = troupellm.tests.support.kv.toy_connector:open_toy\n")
    monkeypatch.syspath_prepend(str(info.parent))
    RELEASED.clear()
    yield
    RELEASED.set()


def settings(tmp_path: Path, role: str, ill: str = "well", policy: str = "recompute") -> dict[str, Any]:
    options = {"path": str(tmp_path / "blocks"), "ill": ill}
    transfer = {"kv_connector": "toy", "kv_role": role, "kv_connector_extra_config": options}
    return {
        "kv_offloading_size": "8MiB",
        "kv_offload_timeout": PATIENT if ill == "well" else IMPATIENT,
        "prefix_hash_secret_file": str(tmp_path / "secret"),
        "kv_transfer_config": transfer | {"kv_load_failure_policy": policy},
        "preemption_mode": "offload",
    }


def tier_of(engine: Any) -> Any:
    return engine.snapshot().scheduler.offload.tiers[1]


def is_idle(engine: Any) -> bool:
    scheduler = engine.snapshot().scheduler
    under_way = scheduler.offload.transfers + scheduler.offload.lookups
    return not any((scheduler.running, scheduler.waiting, scheduler.blocks_used, under_way))


@pytest.fixture
async def left(tiny_engine: Any, tmp_path: Path) -> tuple[int, ...]:
    """The model's tokens without faults, from an engine that leaves its blocks with a healthy plug-in."""
    async with tiny_engine(**settings(tmp_path, "kv_producer")) as engine:
        completion = await engine.generate(PROMPT, **GREEDY)
        await eventually(lambda: tier_of(engine).stores >= BLOCKS)
        tokens: tuple[int, ...] = tuple(completion.token_ids)
        return tokens


async def ask(tiny_engine: Any, given: dict[str, Any], seen: list[Any]) -> Any:
    """Another engine; what hangs in it hangs until its request is over and nothing of it is left."""
    async with tiny_engine(**given) as engine:
        try:
            return await engine.generate(PROMPT, **GREEDY)
        finally:
            try:
                await eventually(lambda: is_idle(engine))
                seen.append((tier_of(engine), engine.snapshot().scheduler))
            finally:
                RELEASED.set()


async def test_C8_blocks_that_one_engine_saved_by_a_plug_in_are_found_by_another(
    tiny_engine: Any, tmp_path: Path, left: tuple[int, ...]
) -> None:
    seen: list[Any] = []
    completion = await ask(tiny_engine, settings(tmp_path, "kv_consumer", policy="fail"), seen)
    assert tuple(completion.token_ids) == left
    assert completion.usage.cached_sources.external == 16 * BLOCKS
    ((tier, _),) = seen
    assert (tier.name, tier.hits, tier.loads) == ("toy", BLOCKS, BLOCKS)
    assert (tier.failures, tier.corrupt, tier.disabled) == (0, 0, "")


async def test_C8_a_plug_in_is_opened_where_the_worker_lives(
    tiny_engine: Any, tmp_path: Path, left: tuple[int, ...]
) -> None:
    given = settings(tmp_path, "kv_consumer") | {"worker_process": True, "spare_worker": False}
    async with tiny_engine(**given) as engine:
        completion = await engine.generate(PROMPT, **GREEDY)
        assert tuple(completion.token_ids) == left
        assert completion.usage.cached_sources.external == 16 * BLOCKS
        assert (tmp_path / "blocks" / OPENED_BY).read_text() == str(engine.snapshot().worker_pid)


@pytest.mark.parametrize("ill", ILL)
async def test_C8_blocks_that_a_sick_plug_in_does_not_give_are_computed(
    tiny_engine: Any, tmp_path: Path, left: tuple[int, ...], ill: str
) -> None:
    seen: list[Any] = []
    with anyio.fail_after(60):
        completion = await ask(tiny_engine, settings(tmp_path, "kv_consumer", ill), seen)
    assert tuple(completion.token_ids) == left
    assert completion.usage.cached_sources.external == 0
    ((tier, scheduler),) = seen
    assert tier.failures + tier.misses + tier.corrupt + scheduler.offload.timeouts > 0
    assert scheduler.worker_losses == 0


@pytest.mark.parametrize("ill", ILL_WHEN_READ)
async def test_C8_a_sick_plug_in_fails_the_request_if_that_is_the_policy(
    tiny_engine: Any, tmp_path: Path, left: tuple[int, ...], ill: str
) -> None:
    seen: list[Any] = []
    with anyio.fail_after(60), pytest.raises(KVLoadFailed, match="toy"):
        await ask(tiny_engine, settings(tmp_path, "kv_consumer", ill, "fail"), seen)
    ((_, scheduler),) = seen
    assert scheduler.worker_losses == 0


@pytest.mark.parametrize("ill", ILL_BEFORE)
async def test_C8_a_plug_in_that_promised_nothing_fails_no_request(
    tiny_engine: Any, tmp_path: Path, left: tuple[int, ...], ill: str
) -> None:
    seen: list[Any] = []
    with anyio.fail_after(60):
        completion = await ask(tiny_engine, settings(tmp_path, "kv_consumer", ill, "fail"), seen)
    assert tuple(completion.token_ids) == left
    ((tier, scheduler),) = seen
    assert tier.failures + scheduler.offload.timeouts > 0
    assert scheduler.worker_losses == 0


@pytest.mark.slow
@pytest.mark.parametrize("ill", ILL)
async def test_C8_canaries_do_not_notice_a_sick_plug_in(
    tiny_engine: Any, tmp_path: Path, left: tuple[int, ...], ill: str
) -> None:
    request = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True} | GREEDY
    async with tiny_engine(**settings(tmp_path, "kv_both", ill)) as engine:
        try:
            async with under_attack(engine, canary_tokens=40) as attacked:
                for number in range(8):
                    body = request | {"prompt": [*PROMPT[: 16 * (number + 1)], 5]}
                    assert (await attacked.client.post("/v1/completions", json=body)).status_code == 200
                answer = await attacked.client.post("/v1/completions", json=request)
                assert tuple(answer.json()["choices"][0]["token_ids"]) == left
        finally:
            RELEASED.set()
