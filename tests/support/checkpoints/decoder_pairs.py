"""Small random checkpoints of every decoder family, in `transformers` and in this engine."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.layers.states import has_states
from troupellm.models.load.architecture import describe_model
from troupellm.models.load.tied_head import settle_head
from troupellm.models.runner.runner import ModelRunner
from troupellm.tests.support.checkpoints.close_calls import LIKELIEST, assert_close_call
from troupellm.tests.support.checkpoints.decoder_families import fresh_model
from troupellm.tests.support.checkpoints.hand_driver import Driver
from troupellm.tests.support.checkpoints.watched_logits import watched_logits

MAX_LEN = 192
Changes = dict[str, Any]


class Pair:
    """One checkpoint in both engines."""

    def __init__(self, folder: Path, config: transformers.PretrainedConfig, kind: str = "") -> None:
        """kind: name of the model's class, where config names none and `AutoModelForCausalLM` does not know it."""
        torch.manual_seed(5)
        model = fresh_model(config, kind=kind).eval()
        for name, parameter in model.named_parameters():
            # Fresh ones are all 1 or all 0, which hides mistakes.
            if "norm" in name or "ln_" in name or name.endswith(("bias", "sinks", "scale")):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            if name.endswith("A_log"):  # with large ones transformers' own sums lose digits
                torch.nn.init.uniform_(parameter, -3.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                torch.nn.init.uniform_(buffer, 0.0, 0.5)
            if name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
        model.save_pretrained(folder)
        self.reference, self.folder = model, folder
        self.open()

    @classmethod
    def stored(cls, folder: Path) -> "Pair":
        """A checkpoint that is there already."""
        pair = cls.__new__(cls)
        pair.reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        pair.folder = folder
        pair.open()
        return pair

    def open(self) -> None:
        """Read the checkpoint with the engine's own code."""
        self.config = settle_head(self.folder, describe_model(self.folder), lambda _: None)
        self.decoder, checkpoint = self._read()
        checkpoint.finish()

    def mistaken(self, *, layers: Changes | None = None, moe: Changes | None = None, **changes: Any) -> "Pair":
        """The same checkpoint, with a description that says something else, also of its layers and their experts."""
        other = copy.copy(self)
        other.config = msgspec.structs.replace(self.config, **changes).with_layers(**layers or {})
        if moe is not None:
            experts = [shape.experts and msgspec.structs.replace(shape.experts, **moe) for shape in self.config.layers]
            other.config = other.config.with_layers(experts=tuple(experts))
        other.decoder, _ = other._read()
        return other

    def _read(self) -> tuple[Decoder, Checkpoint]:
        checkpoint = Checkpoint(self.folder, torch.float32)
        source = decoder_weights(self.config, checkpoint, EMBEDDING)
        return Decoder(self.config, source, max_model_len=MAX_LEN), checkpoint

    def runner(self, num_blocks: int = 120, block_size: int = 8, **more: Any) -> ModelRunner:
        state_slots = 16 if has_states(self.config) else 0
        cache = KVCache(self.config, num_blocks, block_size, torch.float32, state_slots=state_slots)
        cache.storage.fill_(float("nan"))  # unwritten entries may not be read
        if cache.states is not None:
            cache.states.fill(slice(None), float("nan"))
        return ModelRunner(self.decoder, cache, max_model_len=MAX_LEN, **more)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        output = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            use_cache=not has_states(self.config),
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.reference(torch.tensor([tokens])).logits[0]

    def own_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits of this engine after `tokens`, independent of its answer."""
        driver = Driver(self.runner())
        driver.submit(0, tokens)
        with watched_logits(driver.runner) as seen:
            driver.run({0: len(tokens)})
        return seen[-1][-1]

    def check(self, prompt: list[int], got: list[int]) -> None:
        expected = self.greedy(prompt, len(got))
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if ours != theirs:
                before = [*prompt, *expected[:index]]
                likely = self.own_logits(before).log_softmax(-1).topk(LIKELIEST)
                own = dict(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))
                assert_close_call(index, ours, self.logits(before)[-1], own)
                return
