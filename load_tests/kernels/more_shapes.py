"""Shapes of what models call between their products and around drawing."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from troupellm.kernels.act_quant import quantize_activation
from troupellm.kernels.decode_io import Draws, begin, finish
from troupellm.kernels.grouped_linear import grouped_linear
from troupellm.kernels.rope_kv_write import HeadNorms, rope_kv_write
from troupellm.kernels.rope_kv_write.kv_write import kv_rows
from troupellm.kernels.sampling import draw_truncated
from troupellm.kernels.sampling.adjust import keep_bits, penalize
from troupellm.kernels.sampling.logprobs import chosen_logprobs
from troupellm.kernels.sampling.noise import position_keys, stream_key, token_codes
from troupellm.kernels.sampling.truncate import Nucleus
from troupellm.load_tests.kernels import coded_shapes
from troupellm.load_tests.kernels.shapes import BLOCK_SIZE, Shapes, Work

ADAPTERS, RANK = 8, 16
TOP_K, TOP_P = 20, 0.95
"""The settings of a chat model's own configuration."""
LOGITS_BUFFERS = 8
DRAFTS = 4


def works(shapes: Shapes, operation: str, batch: int) -> Iterator[Work]:
    """As `Shapes.works`."""
    makers: dict[str, Callable[[Shapes, int], Iterator[Work]]] = {
        "rope_kv_write": _rope_kv_write,
        "row_codes": _act_quant,
        "grouped_linear": _grouped_linear,
        "truncated_sampling": _truncated_sampling,
        "penalties": _penalties,
        "chosen_logprobs": _chosen_logprobs,
        "step_begin": _step_begin,
        "step_end": _step_end,
        "verify_attention": _verify_attention,
        "guide_masks": _guide_masks,
        "linear_coded": coded_shapes.products,
        "coded_cache_attention": coded_shapes.caches,
        "coded_experts": coded_shapes.experts,
        "latent_attention": coded_shapes.latent,
    }
    return makers[operation](shapes, batch)


def _rope_kv_write(shapes: Shapes, batch: int) -> Iterator[Work]:
    size = shapes.size
    every = size.heads + 2 * size.kv_heads
    caches = shapes.caches(4 * batch + 4)
    slots = torch.randperm(caches[0].shape[0] * BLOCK_SIZE)[:batch].to(shapes.device)
    rows = kv_rows(slots, size.kv_heads, BLOCK_SIZE)
    turns = torch.rand(batch, 1, size.head_dim // 2, device=shapes.device) * 6.28
    angles = turns.cos().to(shapes.dtype), turns.sin().to(shapes.dtype)
    norms = HeadNorms(shapes.random(size.head_dim), shapes.random(size.head_dim), 1e-6)

    def run(qkv: Tensor) -> Tensor:
        heads = qkv.view(batch, every, size.head_dim)
        return rope_kv_write(heads, size.heads, caches, rows, norms=norms, angles=angles)

    return shapes.rowwise("norm, rope and write", run, batch, every * size.head_dim, 2)


def _act_quant(shapes: Shapes, batch: int) -> Iterator[Work]:
    codes = torch.int8 if shapes.device.type == "cpu" else torch.float8_e4m3fn
    return shapes.rowwise(
        "codes", lambda x: quantize_activation(x, codes)[0], batch, shapes.size.hidden, 1 + 1 / shapes.width
    )


def _grouped_linear(shapes: Shapes, batch: int) -> Iterator[Work]:
    """The first half of adapters that rows have in turns."""
    groups, hidden = min(batch, ADAPTERS), shapes.size.hidden
    size = groups * RANK * hidden * shapes.width
    weights = [shapes.random(groups, RANK, hidden) for _ in range(shapes.copies(size))]
    x, out = shapes.random(batch, hidden), torch.zeros(batch, RANK, device=shapes.device, dtype=shapes.dtype)
    rows = torch.arange(batch, dtype=torch.int32, device=shapes.device)
    starts = (torch.arange(groups + 1) * batch // groups).to(torch.int32).to(shapes.device)

    def run(number: int) -> Tensor:
        grouped_linear(x, weights[number % len(weights)], rows, starts, out)
        return out

    moved = size + batch * (hidden + 2 * RANK) * shapes.width
    yield Work(
        f"{groups} adapters, {batch}x{hidden}x{RANK}",
        run,
        size=moved,
        flops=2 * batch * hidden * RANK,
        kind=shapes.kind,
    )


def _logits(shapes: Shapes, batch: int) -> list[Tensor]:
    """With the largest of each row at 0."""
    count = min(LOGITS_BUFFERS, shapes.copies(4 * batch * shapes.size.vocab))
    made = [torch.randn(batch, shapes.size.vocab, device=shapes.device).mul_(3.0) for _ in range(count)]
    return [logits.sub_(logits.amax(1, keepdim=True)) for logits in made]


def _truncated_sampling(shapes: Shapes, batch: int) -> Iterator[Work]:
    device, vocab, logits = shapes.device, shapes.size.vocab, _logits(shapes, batch)
    keys = position_keys(torch.full((batch,), stream_key(1, 0)), torch.arange(batch)).to(device)
    codes, share = token_codes(vocab, device), torch.full((batch, 1), TOP_P, dtype=torch.float64, device=device)
    for name, top_k in ((f"top_k {TOP_K}, ", TOP_K), ("", vocab)):
        nucleus = Nucleus(torch.full((batch, 1), top_k, device=device), share)

        def run(number: int, nucleus: Nucleus = nucleus) -> Tensor:
            return draw_truncated(logits[number % len(logits)], nucleus, keys, codes, 64)

        yield Work(f"{name}top_p {batch}x{vocab}", run, size=4 * batch * vocab, flops=0.0, kind="float32")


def _penalties(shapes: Shapes, batch: int) -> Iterator[Work]:
    """Of rows that have said nothing yet, so that logits stay what they are."""
    device, vocab, logits = shapes.device, shapes.size.vocab, _logits(shapes, batch)
    index = torch.arange(batch, device=device)
    none, one = torch.zeros(batch, device=device), torch.ones(batch, device=device)
    counts = torch.zeros(batch, vocab, dtype=torch.int32, device=device)
    seen = torch.zeros(batch, -(-vocab // 32), dtype=torch.int32, device=device)

    def run(number: int) -> Tensor:
        found = logits[number % len(logits)]
        penalize(found, index, counts, seen, one, none, none)
        return found

    moved = batch * (3 * 4 * vocab + vocab // 8)
    yield Work(f"penalties {batch}x{vocab}", run, size=moved, flops=0.0, kind="float32")


def _chosen_logprobs(shapes: Shapes, batch: int) -> Iterator[Work]:
    vocab, logits = shapes.size.vocab, _logits(shapes, batch)
    chosen = torch.arange(batch, device=shapes.device)
    yield Work(
        f"log-probabilities {batch}x{vocab}",
        lambda number: chosen_logprobs(logits[number % len(logits)], chosen)[0],
        size=4 * batch * vocab,
        flops=0.0,
        kind="float32",
    )


def _step_begin(shapes: Shapes, batch: int) -> Iterator[Work]:
    size, device, width = shapes.size, shapes.device, -(-shapes.context // BLOCK_SIZE)
    slots, ends = torch.arange(batch, device=device), torch.full((batch,), shapes.context, device=device)
    texts = torch.zeros(batch + 1, shapes.context + 1, dtype=torch.int32, device=device)
    tables = torch.arange((batch + 1) * width, dtype=torch.int32, device=device).view(1, batch + 1, width)
    turns = shapes.random(shapes.context, size.head_dim)

    def run(_: int) -> Tensor:
        return begin(
            slots,
            ends,
            None,
            texts,
            tables,
            turns,
            queries=1,
            block_size=BLOCK_SIZE,
            kv_heads=size.kv_heads,
            scratch=batch,
        ).tables

    moved = batch * 2 * (4 * width + shapes.width * size.head_dim)
    yield Work(f"begin of a step {batch}x{shapes.context}", run, size=moved, flops=0.0, kind="int32")


def _step_end(shapes: Shapes, batch: int) -> Iterator[Work]:
    device, vocab, logits = shapes.device, shapes.size.vocab, _logits(shapes, batch)
    slots, ends = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
    texts = torch.zeros(batch, 1, dtype=torch.int32, device=device)
    scales = torch.tensor([1.0, -torch.inf], device=device).repeat(batch, 1)
    streams = torch.tensor([stream_key(1, row) for row in range(batch)], device=device)
    drawn = Draws(scales, streams, token_codes(vocab, device))
    share = torch.full((batch, 1), TOP_P, dtype=torch.float64, device=device)
    cut = drawn._replace(nucleus=Nucleus(torch.full((batch, 1), TOP_K, device=device), share))
    for name, draws in (("likeliest", None), ("drawn", drawn), ("cut", cut)):

        def run(number: int, draws: Draws | None = draws) -> Tensor:
            return finish(logits[number % len(logits)], slots, ends, texts, draws)

        yield Work(f"end of a step, {name} {batch}x{vocab}", run, size=4 * batch * vocab, flops=0.0, kind="float32")


def _verify_attention(shapes: Shapes, batch: int) -> Iterator[Work]:
    keys = max(1, shapes.context - DRAFTS - 1)
    return shapes.attention(f"verify {batch} rows, {keys} keys", [keys] * batch, [DRAFTS + 1] * batch)


def _guide_masks(shapes: Shapes, batch: int) -> Iterator[Work]:
    """That keep all, so that logits stay what they are."""
    vocab, logits = shapes.size.vocab, _logits(shapes, batch)
    index = torch.arange(batch, device=shapes.device)
    bits = torch.full((batch, -(-vocab // 32)), -1, dtype=torch.int32, device=shapes.device)

    def run(number: int) -> Tensor:
        found = logits[number % len(logits)]
        keep_bits(found, index, bits)
        return found

    yield Work(f"masks {batch}x{vocab}", run, size=batch * vocab / 8, flops=0.0, kind="float32")
