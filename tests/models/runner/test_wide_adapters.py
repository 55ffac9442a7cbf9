"""DoRA, adapters of the embedding, and whole embeddings and heads give the tokens of the model that they are merged
into, in steps that mix them with other adapters and the base model."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.models.adapters.adapter import Adapter, read_adapter
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.layers.decoder import Decoder
from troupellm.models.load.base_weights import StoredBase
from troupellm.models.runner.runner import ModelRunner
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.messages.worker import AdapterSlot
from troupellm.tests.support.adapters.peft_folders import ALL, modules, write_adapter
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.watched_logits import watched_logits

PROMPT, NEW_TOKENS, SCALE = make_prompt(19), 8, 2.0
EMBEDDING, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
KINDS = ("plain", "dora", "embedding", "whole")
CPU = torch.device("cpu")


class Wide:
    """A model and an adapter of each kind."""

    def __init__(self, folder: Path, family: str) -> None:
        self.pair = Pair(folder / "model", FAMILIES[family]())
        model, drawn = self.pair.config, torch.Generator().manual_seed(5)
        shape = (model.vocab_size, model.hidden_size)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=drawn) * 0.3

        lengths = {
            f"base_model.model.{name}.lora_magnitude_vector": random(part.width).abs() + 0.5
            for name, (_, part) in modules(model, ALL).items()
        }
        vectors = {
            f"{EMBEDDING}.lora_embedding_A": random(4, shape[0]),
            f"{EMBEDDING}.lora_embedding_B": random(shape[1], 4),
        }
        whole = {f"{EMBEDDING}.weight": random(*shape), f"{HEAD}.weight": random(*shape)}
        changes: dict[str, dict[str, Tensor | None]] = {
            "plain": {},
            "dora": {**lengths},
            "embedding": {**vectors},
            "whole": {**whole},
        }
        base = StoredBase(self.pair.folder, model, None, ModelConfig(), torch.float32)
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.adapters: list[Adapter] = []
        for seed, (kind, changed) in enumerate(changes.items()):
            names = ALL if kind in ("plain", "dora") else ("v_proj",)
            self.tensors[kind] = write_adapter(
                folder / kind, model, names, seed=seed, changed=changed, use_dora=kind == "dora"
            )
            self.adapters.append(read_adapter(folder / kind, model, 8, base=base))

    def driver(self, decoder: Decoder | None = None) -> Driver:
        """With each adapter in a slot."""
        by_digest = {adapter.digest: adapter for adapter in self.adapters}
        slots = AdapterSlots(self.pair.config, by_digest.get, num_slots=4, max_rank=8, dtype=torch.float32, device=CPU)
        cache = KVCache(self.pair.config, 160, 8, torch.float32)
        driver = Driver(ModelRunner(decoder or self.pair.decoder, cache, max_model_len=MAX_LEN, adapters=slots))
        driver.slots = tuple(AdapterSlot(slot, digest) for slot, digest in enumerate(by_digest, 1))
        return driver

    def merged(self, kind: str) -> list[int]:
        """The tokens of the model of transformers with an adapter in its weights."""
        found = copy.copy(self.pair)
        found.reference = copy.deepcopy(self.pair.reference)
        by_name, tensors = dict(found.reference.named_modules()), self.tensors[kind]
        for key, tensor in tensors.items():
            begin, _, rest = key.removeprefix("base_model.model.").partition(".lora_")
            name = f"base_model.model.{begin}"
            if rest == "A.weight":
                weight = by_name[begin].weight
                adapted = weight + SCALE * tensors[f"{name}.lora_B.weight"] @ tensor
                if (length := tensors.get(f"{name}.lora_magnitude_vector")) is not None:
                    adapted = adapted * (length / adapted.norm(dim=1))[:, None]
                by_name[begin].weight = nn.Parameter(adapted.detach())
            elif rest == "embedding_A":
                weight = by_name[begin].weight
                by_name[begin].weight = nn.Parameter(
                    weight + SCALE * (tensors[f"{name}.lora_embedding_B"] @ tensor).t()
                )
            elif not rest:
                by_name[begin.removesuffix(".weight")].weight = nn.Parameter(tensor)
        return found.greedy(PROMPT, NEW_TOKENS)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3_tied", "gemma3"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """Plain; with biases; with one weight for embedding and head; with scaled vectors."""
    return Wide(tmp_path_factory.mktemp(request.param), request.param)


def test_a_crowd_gets_the_tokens_of_each_merged_model(wide: Wide) -> None:
    expected = [wide.pair.greedy(PROMPT, NEW_TOKENS), *(wide.merged(kind) for kind in KINDS)]
    assert len(set(map(tuple, expected))) == len(expected)
    for chunk in (100, 5):
        driver = wide.driver()
        for row in range(5):
            driver.submit(row, PROMPT, row)
        while any(driver.generated(row) < NEW_TOKENS for row in range(5)):
            driver.run({row: min(chunk, len(driver.tokens[row]) - driver.done[row]) for row in range(5)})
        assert [driver.answer(row)[:NEW_TOKENS] for row in range(5)] == expected


def test_a_slot_that_gets_another_adapter_keeps_nothing_of_the_last(wide: Wide) -> None:
    alone, driver = wide.driver(), wide.driver()
    for row in range(5):
        alone.submit(row, PROMPT, row)
        alone.generate(row, 3)
    for row, adapter in enumerate(reversed(wide.adapters)):
        driver.slots = (AdapterSlot(1, adapter.digest),)
        driver.submit(row, PROMPT, 1)
        driver.generate(row, 3)
        assert driver.answer(row) == alone.answer(4 - row)


def test_batch_invariant_rows_have_the_same_bits_in_any_company(wide: Wide) -> None:
    with batch_invariant():
        decoder = Decoder(wide.pair.config, Checkpoint(wide.pair.folder, torch.float32), max_model_len=MAX_LEN)
    found = []
    for rows in (range(5), (2,), (4,), (3, 0)):
        driver = wide.driver(decoder)
        for row in rows:
            driver.submit(row, PROMPT, row)
        with watched_logits(driver.runner) as seen:
            driver.run(dict.fromkeys(rows, len(PROMPT)))
        found.append(dict(zip(rows, seen[-1], strict=True)))
    for scores in found[1:]:
        for row, logits in scores.items():
            assert torch.equal(logits, found[0][row]), row
