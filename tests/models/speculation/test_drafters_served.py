"""Engines with every drafter that is a model write what engines without write: crowds, prefix hits, preemption."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import troupellm
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.speculation import drafter
from troupellm.models.speculation.speculator import Speculator
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.tests.support.checkpoints.byte_tokenizer import write_tokenizer
from troupellm.tests.support.checkpoints.deepseek_mtp import write_deepseek
from troupellm.tests.support.speculation.plain_heads import write_drafters

TOKENS = 40
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "flush_interval": 0.0,
    "block_size": 8,
    "max_num_prefill_tokens": 512,
}
ROOMY, SMALL = {"num_gpu_blocks_override": 200}, {"num_gpu_blocks_override": 24, "max_model_len": 128}
Kept = list[tuple[int, int]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafters(tmp_path_factory.mktemp("served"))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """(drafts, accepted drafts) of every row of every step."""
    found: Kept = []
    finish = Speculator.finish

    def watched(self: Speculator, verify_batch: Any, verdict: Any, *rest: Any) -> None:
        found.extend(
            (len(drafts), verdict[row].accepted) for row, drafts in verify_batch.drafts.items() if row in verdict
        )
        finish(self, verify_batch, verdict, *rest)

    monkeypatch.setattr(Speculator, "finish", watched)
    return found


def prompts() -> list[list[int]]:
    text = np.random.default_rng(3).integers(0, 250, 200).tolist()
    return [text[:5], text[10:60], text[10:50] + text[90:110], text[:60], text[100:131], text[10:60], text[30:31]]


async def answers(target: Path, wanted: dict[str, object] | None, **settings: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()] * len(prompts())
    sampling = settings.pop("sampling", {"temperature": 0.0})
    async with troupellm.Engine(target, speculative_config=wanted, **(SETTINGS | settings)) as engine:

        async def one(index: int, prompt: Sequence[int]) -> None:
            answer = await engine.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **sampling)
            found[index] = tuple(answer.token_ids)

        for _ in range(2):  # the second time everything is in the prefix cache
            async with anyio.create_task_group() as group:
                for index, prompt in enumerate(prompts()):
                    group.start_soon(one, index, prompt)
    return found


_plain: dict[str, list[tuple[int, ...]]] = {}


async def without_drafts(target: Path, **settings: Any) -> list[tuple[int, ...]]:
    """The target's own tokens, computed once."""
    key = f"{target} {settings}"
    if key not in _plain:
        _plain[key] = await answers(target, None, **settings)
    return _plain[key]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "pool", [pytest.param(ROOMY, id="roomy", marks=pytest.mark.slow), pytest.param(SMALL, id="small")]
)
async def test_a_target_that_drafts_for_itself_is_always_right(home: Path, kept: Kept, pool: dict[str, Any]) -> None:
    target, most = home / "target", 3
    wanted = {"method": "draft_model", "model": str(target), "num_speculative_tokens": most, "adaptive": False}
    settings = pool | {"max_num_batched_tokens": 48}
    assert await answers(target, wanted, **settings) == await without_drafts(target, **settings)
    assert all(drafted == accepted for drafted, accepted in kept)
    assert sum(drafted == most for drafted, _ in kept) > 60


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["draft_model", "eagle", pytest.param("eagle3", marks=pytest.mark.slow), "medusa"])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 0.0}, id="greedy"),
        pytest.param({"temperature": 0.8, "seed": 3, "min_p": 0.02}, id="sampled", marks=pytest.mark.slow),
    ],
)
async def test_texts_are_the_same_with_drafts(home: Path, kept: Kept, method: str, sampling: dict[str, Any]) -> None:
    folder = home / ("small" if method == "draft_model" else method)
    wanted = {
        "method": method,
        "model": str(folder),
        "num_speculative_tokens": 3,
        "adaptive": False,
        "draft_sample_method": "probabilistic",
    }
    settings = SMALL | {"max_num_batched_tokens": 48, "sampling": sampling}
    assert await answers(home / "target", wanted, **settings) == await without_drafts(home / "target", **settings)
    assert sum(drafted for drafted, _ in kept) > 300


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "widths"), [("eagle", [3, 2, 2]), pytest.param("medusa", [3, 4], marks=pytest.mark.slow)]
)
async def test_texts_are_the_same_with_trees(home: Path, kept: Kept, method: str, widths: list[int]) -> None:
    wanted = {"method": method, "model": str(home / method), "tree_widths": widths, "adaptive": False}
    settings = SMALL | {"max_num_batched_tokens": 64}
    assert await answers(home / "target", wanted, **settings) == await without_drafts(home / "target", **settings)
    assert sum(drafted for drafted, _ in kept) > 500


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_model_with_next_token_layers(tmp_path: Path, kept: Kept) -> None:
    folder, _, _ = write_deepseek(tmp_path / "deepseek")
    write_tokenizer(folder, 300)
    wanted = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    assert await answers(folder, wanted, **SMALL) == await answers(folder, None, **SMALL)
    assert sum(drafted for drafted, _ in kept) > 300


@pytest.mark.anyio
async def test_a_quantized_draft_model(home: Path, kept: Kept) -> None:
    wanted = {"method": "draft_model", "model": str(home / "target"), "quantization": "int8", "adaptive": False}
    assert await answers(home / "target", wanted, **ROOMY) == await without_drafts(home / "target", **ROOMY)
    assert sum(accepted for _, accepted in kept) > 100, "in eight bits it should be right now and then"


@pytest.mark.anyio
async def test_drafters_sleep_and_wake_with_their_model(home: Path, kept: Kept) -> None:
    wanted = {"method": "eagle", "model": str(home / "eagle"), "num_speculative_tokens": 2, "adaptive": False}
    async with troupellm.Engine(home / "target", speculative_config=wanted, **(SETTINGS | ROOMY)) as engine:
        prompt = prompts()[1]
        before = await engine.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True)
        for level in (1, 2):
            await engine.sleep(level)
            await engine.wake()
            drafted = len(kept)
            after = await engine.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert after.token_ids == before.token_ids
            assert len(kept) > drafted


@pytest.mark.anyio
@pytest.mark.parametrize(
    "method", ["eagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("draft_model", "eagle3", "medusa"))]
)
async def test_a_text_in_the_middle_of_which_the_engine_sleeps_is_drafted_for_behind_that(
    home: Path, kept: Kept, method: str
) -> None:
    folder = home / ("target" if method == "draft_model" else method)
    wanted = {"method": method, "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    asked: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    async with troupellm.Engine(home / "target", **(SETTINGS | ROOMY)) as engine:
        alone = (await engine.generate(prompts()[1], **asked)).token_ids
    async with troupellm.Engine(home / "target", speculative_config=wanted, **(SETTINGS | ROOMY)) as engine:
        for level in (1, 2):
            said: list[int] = []
            async with engine.stream(prompts()[1], **asked) as stream:
                async for delta in stream:
                    if not said:
                        await engine.sleep(level, "keep")
                        await engine.wake()
                        kept.clear()
                    said += delta.token_ids
            assert tuple(said) == tuple(alone)
            assert sum(drafted for drafted, _ in kept) >= 20
            if method == "draft_model":
                assert all(drafted == accepted for drafted, accepted in kept), "it is the model itself"


class Dozes:
    """A proposer is neither asked nor shown anything in five steps of eighteen."""

    def __init__(self) -> None:
        self._asked = self.slept = 0

    def add_row(self, slot: int) -> None:
        """All are alike."""

    def rests(self, batch_size: int, moment: float, *, mixed: bool = False, left: int = 0) -> int:
        self._asked += 1
        rests = self._asked % 14 == 1
        self.slept += rests
        return 5 if rests else 0

    def limits(self, slots: np.ndarray, batch_size: int, most: np.ndarray) -> np.ndarray:
        return most

    def learn(self, *seen: Any) -> None:
        """Measures nothing."""


@pytest.mark.anyio
@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({"method": "draft_model", "num_speculative_tokens": 2}, marks=pytest.mark.slow),
        pytest.param({"method": "eagle", "num_speculative_tokens": 3}, marks=pytest.mark.slow),
        {"method": "eagle", "tree_widths": [3, 2, 2]},
        pytest.param({"method": "eagle3", "num_speculative_tokens": 3}, marks=pytest.mark.slow),
        pytest.param({"method": "medusa", "num_speculative_tokens": 3}, marks=pytest.mark.slow),
    ],
    ids=["draft_model", "eagle", "trees of eagle", "eagle3", "medusa"],
)
async def test_rows_draft_again_behind_every_sleep_of_their_drafter(
    home: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, object]
) -> None:
    folder = home / ("small" if wanted["method"] == "draft_model" else str(wanted["method"]))
    dozes = Dozes()
    monkeypatch.setattr(drafter, "_length", lambda *_: dozes)
    settings = {"max_num_batched_tokens": 64}
    found = await answers(home / "target", wanted | {"model": str(folder)}, **(ROOMY | settings))
    assert sum(drafted > 0 for drafted, _ in kept) > 200, "most rows are there for some two such sleeps"
    assert dozes.slept >= 4
    small = await answers(home / "target", wanted | {"model": str(folder)}, **(SMALL | settings))
    assert found == small == await without_drafts(home / "target", **(ROOMY | settings))


class Naps(Dozes):
    """A proposer is asked nothing as long as it is told so."""

    asleep_now = True

    def rests(self, batch_size: int, moment: float, *, mixed: bool = False, left: int = 0) -> int:
        return int(self.asleep_now)


@pytest.mark.anyio
async def test_a_conversation_that_began_while_its_drafter_slept_is_drafted_for_like_any_other(
    home: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_sleep, target = Naps(), home / "target"
    monkeypatch.setattr(drafter, "_length", lambda *_: short_sleep)
    wanted = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    async with troupellm.Engine(target, speculative_config=wanted, **(SETTINGS | ROOMY)) as engine:
        first = await engine.generate(prompts()[1], **asked)
        assert not kept
        short_sleep.asleep_now = False
        again = await engine.generate([*prompts()[1], *first.token_ids, 5, 6, 7], **asked)
    assert again.usage.cached_tokens > 64
    assert sum(drafted for drafted, _ in kept) > 15
    assert all(drafted == accepted for drafted, accepted in kept), "it is the model itself"


@pytest.mark.anyio
async def test_a_drafter_that_sleeps_is_told_nothing_of_rows_that_do_not_write(
    home: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "_length", lambda *_: Dozes())
    wanted = {"method": "eagle", "model": str(home / "eagle"), "num_speculative_tokens": 3}
    async with troupellm.Engine(home / "target", **(SETTINGS | ROOMY)) as engine:
        vectors = await engine.embed(prompts())
    async with troupellm.Engine(home / "target", speculative_config=wanted, **(SETTINGS | ROOMY)) as engine:
        found = await engine.embed(prompts())
        await engine.generate(prompts()[1], max_tokens=40, temperature=0.0, ignore_eos=True)
        assert engine.snapshot().scheduler.worker_losses == 0
    assert np.allclose(found, vectors, atol=1e-4)
    assert sum(drafted for drafted, _ in kept) > 10


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_the_memory_of_a_drafter_is_planned(home: Path, method: str) -> None:
    folder = home / ("small" if method == "draft_model" else method)
    settings = {"model": str(home / "target"), **SETTINGS, **ROOMY}
    plain = ModelWorker(home / "target").load(EngineConfig.from_flat(settings), lambda _: None)
    worker = ModelWorker(home / "target")
    wanted = {"method": method, "model": str(folder)}
    ready = worker.load(EngineConfig.from_flat(settings | {"speculative_config": wanted}), lambda _: None)
    assert isinstance(worker.runner, ModelRunner)
    held = sum(storage.nbytes for storage in worker.runner.cache.storages)
    assert ready.kv_cache_bytes == held == sum(group.block_bytes for group in ready.groups) * ready.num_blocks
    assert (ready.kv_cache_bytes > plain.kv_cache_bytes) == (method != "medusa")
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.5 * weights < ready.weight_bytes - plain.weight_bytes < 1.5 * weights
    worker.close()
