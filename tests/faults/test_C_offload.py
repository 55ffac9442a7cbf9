"""Row C8 of the fault table: a disk tier that is full, slow, sick, damaged or taken away. Requests go on with what they
compute themselves, the tier is left alone and counted, and what it says is never believed unless it is whole."""

import errno
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.models.kv_offload import disk_store, store_tier
from troupellm.models.kv_offload.disk_store import DiskStore
from troupellm.tests.support.servers.canary import Attacked, under_attack
from troupellm.tests.support.servers.processes import SMALL, ready_process
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio

SETTINGS = {
    "num_gpu_blocks_override": 72, "block_size": 16, "max_model_len": 1024, "kv_offloading_size": "128KiB",
    "preemption_mode": "offload",
    "kv_offload_disk_bytes": 16 * 2**20,
}  # fmt: skip
"""Host memory holds 32 blocks of the tiny model: less than the prompts below, so that the disk has to."""
PROMPTS = [[7 + number] * 3 + list(range(40, 165)) for number in range(16)]
"""Eight blocks each: more than the device holds."""


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "FIRST_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(store_tier, "LAST_PROBE_SECONDS", 0.2)


class Attack:
    """Conversations whose prefixes lie on disk, beside canaries."""

    def __init__(self, engine: Engine, attacked: Attacked, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self._client = attacked.client
        self._answers: dict[int, list[int]] = {}

    async def ask_all(self) -> None:
        """Every prompt in turn; each is answered as it was the first time."""
        for number, prompt in enumerate(PROMPTS):
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = await self._client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            tokens = answer.json()["choices"][0]["token_ids"]
            assert self._answers.setdefault(number, tokens) == tokens

    async def fill(self) -> None:
        """Until the disk has what the device has not."""
        await self.ask_all()
        await eventually(lambda: self.at_rest and len(self.files) > 70)
        before = self.tier.loads
        await self.ask_all()
        assert self.tier.loads > before
        assert not self.tier.disabled
        await eventually(lambda: self.at_rest)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.kv"))

    @property
    def at_rest(self) -> bool:
        offload = self.engine.snapshot().scheduler.offload
        return not (offload.transfers or offload.lookups or offload.waiting_spills)

    @property
    def tier(self) -> object:
        """The disk."""
        return self.engine.snapshot().scheduler.offload.tiers[1]

    async def until_disabled(self) -> None:
        """It has been left alone since the attack began; a probe may have found that it works again."""
        with anyio.fail_after(60):
            while not self.tier.disablings:
                await self.ask_all()
        assert self.tier.failures > 0

    async def until_it_works(self) -> None:
        """It is tried again, and serves again."""
        with anyio.fail_after(60):
            while self.tier.disabled:
                await self.ask_all()
        before = self.tier.loads + self.tier.stores
        with anyio.fail_after(60):
            while self.tier.loads + self.tier.stores == before:
                await self.ask_all()


@pytest.fixture
def attack(tiny_engine: Callable[..., Engine], tmp_path: Path) -> Callable[..., object]:
    @asynccontextmanager
    async def start(**settings: object) -> AsyncIterator[Attack]:
        folder = tmp_path / "blocks"
        own = {**SETTINGS, "kv_offload_disk_path": str(folder), **settings}
        async with tiny_engine(**own) as engine, under_attack(engine, canary_tokens=40) as attacked:
            found = Attack(engine, attacked, folder)
            await found.fill()
            yield found
            await eventually(lambda: found.at_rest)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("troupellm-kv")]

    return start


async def test_C8_flipped_bits_are_never_believed(attack):
    source = random.Random(8)
    async with attack() as found:
        for path in found.files:
            content = bytearray(path.read_bytes())
            bit = source.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
        await found.ask_all()
        assert found.tier.corrupt > 0
        assert not found.tier.disabled


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "short", "exchanged", "gone", "links"])
async def test_C8_damaged_files_are_misses(attack, damage):
    async with attack() as found:
        files = found.files
        for path, other in zip(files, files[1:] + files[:1], strict=True):
            match damage:
                case "empty":
                    path.write_bytes(b"")
                case "short":
                    path.write_bytes(path.read_bytes()[:-1])
                case "exchanged":
                    path.write_bytes(other.read_bytes() if path != files[-1] else b"")
                case "gone":
                    path.unlink()
                case _:
                    path.unlink()
                    path.symlink_to("/dev/zero")
        await found.ask_all()
        assert not found.tier.disabled
        assert (found.tier.corrupt > 0) is (damage in ("empty", "short", "exchanged"))
        await found.until_it_works()


async def test_C8_a_full_disk_disables_its_tier(attack):
    """A limit on the size of files ends writes in the middle, as a full disk does."""
    async with attack() as found:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for path in found.files:
            path.unlink()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            await found.until_disabled()
            assert found.tier.disabled == os.strerror(errno.EFBIG)
            await found.ask_all()
            assert not list(found.folder.glob(".*.kv-new"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await found.until_it_works()


@pytest.mark.slow
async def test_C8_a_folder_that_is_taken_away(attack):
    async with attack() as found:
        shutil.rmtree(found.folder)
        await found.until_disabled()
        await found.until_it_works()
        assert len(found.files) > 0


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["preadv", "writev"])
async def test_C8_a_medium_that_fails(attack, monkeypatch, caplog, code, call):
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    async with attack() as found:
        for path in found.files if call == "writev" else ():
            path.unlink()
        with monkeypatch.context() as patched:
            patched.setattr(disk_store.os, call, fail)
            await found.until_disabled()
            assert any(os.strerror(code) in record.message for record in caplog.records)
        await found.until_it_works()


@pytest.mark.slow
async def test_C8_a_disk_that_hangs_disables_its_tier(attack, monkeypatch):
    """None of its transfers ends; the tier is left alone, and late ends do no harm."""
    gate = threading.Event()

    def slow(store: DiskStore, *given: object, real: Callable[..., None]) -> None:
        gate.wait()
        real(store, *given)

    async with attack(kv_offload_timeout=0.5) as found:
        with monkeypatch.context() as patched:
            for name in ("get", "put", "probe"):
                real = getattr(DiskStore, name)
                patched.setattr(DiskStore, name, lambda store, *given, real=real: slow(store, *given, real=real))
            try:
                await found.until_disabled()
                assert found.tier.disabled == "slower than 0.5 s"
                await found.ask_all()
            finally:
                gate.set()
        await found.until_it_works()


async def _ask(client: httpx.AsyncClient) -> tuple[list[int], int]:
    """The answer of a long prompt, and how much of it was cached."""
    body = {"model": "tiny", "prompt": list(range(30, 190)), "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow  # `test_engine_offload` has it of an engine that ends
async def test_C8_a_conversation_s_prefix_survives_kill_9(checkpoint, tmp_path):
    folder = tmp_path / "blocks"
    # So small a model may compute as quickly as the disk gives: here it is to be asked all the same.
    tiers = ("--kv-offloading-size", "1MiB", "--kv-offload-disk-path", str(folder), "--preemption-mode", "offload")
    flags = (*SMALL, *tiers)
    async with ready_process(checkpoint, *flags) as server:
        async with server.client() as client:
            expected, cached = await _ask(client)
        assert cached == 0
        with anyio.fail_after(30):
            while len(list(folder.glob("*.kv"))) < 9:  # noqa: ASYNC110 - another process's state
                await anyio.sleep(0.02)
        server.note_children()
        server.signal(signal.SIGKILL)
        await server.exit_code(10)
    async with ready_process(checkpoint, *flags) as server, server.client() as client:
        again, cached = await _ask(client)
        assert again == expected
        assert cached >= 9 * 16, [
            line for line in (await client.get("/metrics")).text.splitlines() if "offload" in line
        ]
