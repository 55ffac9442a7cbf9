"""SmolLM2 135M as llama.cpp's own quantizer writes it: greedy tokens in every tensor type that it knows.

Rows of this model are 576 wide, no multiple of 256, except those of `ffn_down`. So the mixtures have the types that
llama.cpp falls back to, and each further type is that of `ffn_down` alone.
"""

from pathlib import Path

import anyio
import gguf
import pytest

from troupellm.tests.support.checkpoints.observed import Reference, Served, check_greedy, serve
from troupellm.tests.support.checkpoints.real_models import SMOLLM2, real_model
from troupellm.tests.support.checkpoints.real_prompts import PROMPTS
from troupellm.tests.support.gguf import llama_cpp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIXTURES = tuple(llama_cpp.FILE_TYPES)
DOWN = (
    "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "TQ1_0",
    "TQ2_0", "MXFP4",
)  # fmt: skip
"""All types of a tensor that no mixture gives this model, and the two K-quants that one gives to few tensors only."""
FEW = PROMPTS[:8]
NEW_TOKENS = 24
TIE = 5e-3
"""Packed products round their inputs to 16 bits. On this model that moves log-probabilities by 6e-4 in the root mean
square, in each type of the weights, and by 5e-3 at most (600 tokens of four types)."""


def check(path: Path) -> None:
    async def ask() -> Served:
        return await serve(path, FEW, tokens=NEW_TOKENS, text=PROMPTS[0], texts=())

    served = anyio.run(ask)
    assert [len(answer.tokens) for answer in served.answers] == [NEW_TOKENS] * len(FEW)
    check_greedy(Reference(path), served.answers, tie=TIE)


@pytest.mark.parametrize("file_type", MIXTURES)
def test_greedy_tokens_of_a_file_type_are_those_of_transformers(tmp_path: Path, file_type: str) -> None:
    llama_cpp.requantize(real_model(SMOLLM2), tmp_path / f"{file_type}.gguf", file_type)
    check(tmp_path / f"{file_type}.gguf")


@pytest.mark.parametrize("kind", DOWN)
def test_greedy_tokens_of_a_tensor_type_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{kind}.gguf"
    llama_cpp.requantize(real_model(SMOLLM2), path, "Q8_0", {"ffn_down": kind})
    written = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if "ffn_down" in tensor.name}
    assert written == {kind}
    check(path)
