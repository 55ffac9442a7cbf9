"""Engines whose device's runner drafts with models write what the CPU's runner writes without drafts."""

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from troupellm import Engine
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.speculation.speculator import Speculator
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.speculation.plain_heads import write_drafters

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {
    "dtype": "float32", "block_size": 8, "num_gpu_blocks_override": 24, "kv_cache_memory_bytes": None,
    "max_model_len": 128, "max_num_batched_tokens": 48,
}  # fmt: skip
LONG = {"max_tokens": 24, "ignore_eos": True}
GUIDE = StructuredOutputsParams(choice=["a very long choice", "a short one"]).spec()
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, **LONG},
    {"temperature": 0.8, "seed": 3, "min_p": 0.02, **LONG},
    {"temperature": 0.0, "repetition_penalty": 1.3, **LONG},
    {"temperature": 0.0, "guide": GUIDE, **LONG},
    {"temperature": 0.0, **LONG},
)
Texts = list[tuple[int, ...]]


def prompts() -> list[list[int]]:
    text = np.random.default_rng(3).integers(0, 250, 100).tolist()
    return [text[:5], text[10:50], text[10:42] + text[90:99], text[60:61], text[:33]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def plain() -> list[Texts]:
    """Texts written without drafts, filled on first use."""
    return []


async def answers(target: Path, wanted: dict[str, object] | None) -> Texts:
    found: Texts = [()] * len(OPTIONS)
    async with Engine(target, speculative_config=wanted, **(SETTINGS | SMALL)) as engine:

        async def one(number: int) -> None:
            answer = await engine.generate(prompts()[number], **OPTIONS[number])
            found[number] = tuple(answer.token_ids)

        for _ in range(2):  # the second time from the prefix cache
            async with anyio.create_task_group() as group:
                for number in range(len(OPTIONS)):
                    group.start_soon(one, number)
    return found


@pytest.mark.parametrize(
    ("method", "widths"),
    [
        ("draft_model", ()),
        ("eagle", ()),
        ("eagle", (3, 2, 2)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("eagle3", ()), ("medusa", ()), ("medusa", (3, 4)))),
    ],
)
async def test_texts_are_the_same_with_drafts(
    home: Path, plain: list[Texts], gpu: None, monkeypatch: pytest.MonkeyPatch, method: str, widths: tuple[int, ...]
) -> None:
    runners, drafted = set(), []
    finish, launch = Speculator.finish, CudaRunner.launch

    def watched(self: Speculator, trial: Any, judged: Any) -> None:
        drafted.append(self.num_drafts)
        finish(self, trial, judged)

    monkeypatch.setattr(Speculator, "finish", watched)
    monkeypatch.setattr(CudaRunner, "launch", lambda self, plan: runners.add(type(self)) or launch(self, plan))
    folder = home / ("target" if method == "draft_model" else method)
    wanted = {
        "method": method,
        "model": str(folder),
        "num_speculative_tokens": sum(widths) or 3,
        "adaptive": False,
        "draft_sample_method": "probabilistic",
    }
    if widths:
        wanted["tree_widths"] = list(widths)
    got = await answers(home / "target", wanted)
    assert runners == {CudaRunner}
    assert sum(drafted) > 100
    monkeypatch.undo()
    if not plain:
        plain.append(await answers(home / "target", None))
    assert got == plain[0]
