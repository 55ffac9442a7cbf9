"""Adapters over the blocks of a GGUF file give the scores of the model of transformers that they are merged into."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import troupellm
from troupellm.models.load.architecture import describe_model
from troupellm.tests.support.adapters.peft_folders import ALL, modules, write_adapter
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPT = [7, 30, 11, 52, 90, 4]
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def merged(model: torch.nn.Module, tensors: dict[str, Tensor]) -> torch.nn.Module:
    """A model with an adapter of scale 2 in its weights."""
    found = copy.deepcopy(model)
    by_name = dict(found.named_modules())
    with torch.no_grad():
        for key, down in tensors.items():
            begin = key.partition(".lora_")[0]
            weight = by_name[begin.removeprefix("base_model.model.")].weight
            if key.endswith(".lora_A.weight"):
                weight += 2.0 * tensors[f"{begin}.lora_B.weight"] @ down
                if (length := tensors.get(f"{begin}.lora_magnitude_vector")) is not None:
                    weight *= (length / weight.norm(dim=1))[:, None]
            elif key.endswith(".lora_embedding_A"):
                weight += 2.0 * (tensors[f"{begin}.lora_embedding_B"] @ down).t()
    return found


async def test_adapters_over_blocks_give_the_scores_of_the_merged_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    kinds = {"": Kind.Q8_0, "attn_q": Kind.Q4_K, "ffn_down": Kind.Q6_K}
    written = Written(tmp_path / "tiny.gguf", config, kinds)
    described, drawn = describe_model(written.path), torch.Generator().manual_seed(3)
    places = modules(described, ALL).items()
    lengths = {
        f"base_model.model.{name}.lora_magnitude_vector": torch.rand(part.width, generator=drawn) + 1.0
        for name, (_, part) in places
    }
    vectors = {
        f"{EMBEDDING}.lora_embedding_A": torch.randn(4, config.vocab_size, generator=drawn) * 0.3,
        f"{EMBEDDING}.lora_embedding_B": torch.randn(config.hidden_size, 4, generator=drawn) * 0.3,
    }
    tensors: dict[str, dict[str, Tensor]] = {"": {}}
    tensors["all"] = write_adapter(tmp_path / "all", described, rank=4)
    tensors["dora"] = write_adapter(tmp_path / "dora", described, rank=2, seed=1, use_dora=True, changed={**lengths})
    tensors["embedding"] = write_adapter(tmp_path / "embedding", described, (), rank=4, changed={**vectors})
    options = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "logprobs": 5}
    found = set()
    async with troupellm.Engine(str(written.path), enable_lora=True, lora_dir=[str(tmp_path)], **SETTINGS) as engine:
        for name, parts in tensors.items():
            with torch.inference_mode():
                expected = merged(written.model, parts)(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
            answer = await engine.generate(PROMPT, adapter=name, **options)
            (likely,) = answer.choices[0].logprobs
            found.add(round(likely.logprob, 1))
            assert abs(likely.logprob - float(expected[answer.token_ids[0]])) < 0.05, name
            assert float(expected.max() - expected[answer.token_ids[0]]) < 0.05, name
    assert len(found) > 1
