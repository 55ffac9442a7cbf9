"""Checks before serving that a model of `transformers` works with paged attention. Some models keep state or add biases
that no interface shows, and would silently give wrong answers."""

from array import array
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from troupellm.kernels.kv_quant import FP8
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.transformers_backend.decoder import TransformersDecoder
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan

LENGTH = 40
CUTS = (1, 18)
"""Places at which the sequence is cut into steps."""
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05, torch.int8: 0.1, FP8: 0.3}
"""Root mean square of the difference, by that of the logits around their mean; of the model's type or the cache's."""


class Watched(TransformersDecoder):
    """Keeps the hidden states of all tokens that go through another decoder."""

    def __init__(self, decoder: TransformersDecoder) -> None:
        self.__dict__.update(decoder.__dict__)
        self.seen: list[Tensor] = []

    def forward(self, batch: ForwardBatch, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """As `Decoder.forward`."""
        hidden = super().forward(replace(batch, logit_tokens=None), caches)
        self.seen.append(hidden)
        return batch.with_logits(hidden)


def check_decoder(decoder: TransformersDecoder, cache: KVCache, *, max_model_len: int) -> None:
    """Compute two sequences side by side and by steps over the cache, and each at once without it.

    Writes into the first blocks, which hold nothing yet.

    Raises:
        ModelLoadError: they differ.
    """
    groups = len(cache.layout.windows)
    length = min(LENGTH, max_model_len - 1, cache.num_blocks // (2 * groups) * cache.block_size)
    if length < 1:
        return  # no sequence is longer than a token, which has nothing to remember
    width = decoder.config.vocab_size
    texts = [[(7 * place * place + 3 * place + 11 + 5 * row) % width for place in range(length)] for row in range(2)]
    error = spread = torch.zeros((), dtype=torch.float32)
    try:
        by_steps = _by_steps(decoder, cache, texts, max_model_len)
        at_once = [decoder.plain_logits(text) for text in texts]
    except ModelLoadError:
        raise
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"[:200]
        raise ModelLoadError(f"{decoder.config.architecture} does not go with paged attention: {reason}") from failure
    for got, expected in zip(by_steps, at_once, strict=True):
        error = torch.maximum(error, (got - expected).square().mean().sqrt())
        spread = torch.maximum(spread, (expected - expected.mean()).square().mean().sqrt())
    if not error <= max(TOLERANCE[decoder.dtype], TOLERANCE[cache.storage.dtype]) * spread:
        raise ModelLoadError(
            f"{decoder.config.architecture} does not go with paged attention: what it computes step by step differs "
            f"from what it computes at once, by {float(error / spread):.3f} of the spread",
            hint="it keeps or adds something that attention's interface does not show",
        )


@torch.inference_mode()
def _by_steps(decoder: TransformersDecoder, cache: KVCache, texts: list[list[int]], max_model_len: int) -> list[Tensor]:
    """Per sequence, the logits (or hidden states, where there is no head) of all tokens: float32 [tokens, width]."""
    watched = Watched(decoder)
    runner = ModelRunner(watched, cache, max_model_len=max_model_len)
    groups, length = len(cache.layout.windows), len(texts[0])
    each = -(-length // cache.block_size)
    new = tuple(
        NewRow(
            row=row,
            epoch=0,
            request_id="",
            num_prompt_tokens=length + 1,  # one more, so that nothing is sampled
            token_ids=array("i", [*text, 0]).tobytes(),
            sampling=SamplingState(temperature=0.0),
            blocks=tuple(
                tuple(range((row * groups + group) * each, (row * groups + group + 1) * each))
                for group in range(groups)
            ),
        )
        for row, text in enumerate(texts)
    )
    cuts = [0, *(cut for cut in CUTS if cut < length), length]
    for step, (start, end) in enumerate(pairwise(cuts)):
        plan = StepPlan(
            step=step,
            engine_epoch=0,
            rows=(0, 1),
            epochs=(0, 0),
            starts=(start, start),
            counts=(end - start, end - start),
            new_rows=new if step == 0 else (),
        )
        runner.run(plan)
    halves = [hidden.chunk(2) for hidden in watched.seen]
    found = [torch.cat([half[row] for half in halves]) for row in range(2)]
    return [hidden.float() if decoder.head is None else decoder.logits(hidden) for hidden in found]
