"""Calls of compiled attention, decoder layers and decode steps with random sizes, each compared with a reference."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import kv_quant
from troupellm.kernels.fused_decoder import layers as decoder_layers, step as decode_step
from troupellm.kernels.fused_decoder.layers import DecoderLayers, FusedLayerWeights
from troupellm.kernels.linear import pack
from troupellm.kernels.paged_attention import cpu
from troupellm.kernels.paged_attention.cpu import CELLS, CppAttention, Rotation
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.paged_attention.tree import NO_TREE, TreeMask
from troupellm.kernels.quantized_linear.cpu_blocks import BlockProduct
from troupellm.kernels.rope_kv_write.kv_write import kv_rows, kv_write
from troupellm.kernels.rope_kv_write.rope_reference import rope_reference
from troupellm.kernels.sampling import cpu as sampling
from troupellm.kernels.sampling.noise import token_codes
from troupellm.tests.support.kernels.random_calls import (
    MOST_ROWS,
    Calls,
    Random,
    each,
    floats,
    near,
    options,
    some_blocks,
    some_product,
)

CHECKED = 3
"""Tokens of a call that are compared with the reference, which takes its time for each."""
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Batch:
    """Rows of a step and their blocks."""

    starts: np.ndarray
    counts: np.ndarray
    tables: np.ndarray
    block_size: int
    num_blocks: int

    @property
    def positions(self) -> np.ndarray:
        """Places in the cache, of each token."""
        spans = zip(self.starts.tolist(), self.counts.tolist(), strict=True)
        return np.concatenate([np.arange(start, start + count) for start, count in spans])

    @property
    def owners(self) -> np.ndarray:
        return np.repeat(np.arange(self.counts.size), self.counts)

    def plan(self, kv_heads: int, window: int | None, *, by_token: bool = False, tree: TreeMask | None = None):
        return AttentionPlan(
            self.tables,
            self.starts,
            self.counts,
            block_size=self.block_size,
            num_kv_heads=kv_heads,
            window=window,
            by_token=by_token,
            tree=tree,
        )

    def rows(self, kv_heads: int) -> Tensor:
        """Where keys and values go."""
        blocks = self.tables[self.owners, self.positions // self.block_size].astype(np.int64)
        return kv_rows(
            torch.from_numpy(blocks * self.block_size + self.positions % self.block_size), kv_heads, self.block_size
        )


def a_batch(random: Random, *, alone: bool | None = None) -> Batch:
    """Rows of one token each, or of up to `MOST_ROWS` together."""
    num_rows, block_size = int(random.integers(1, 7)), int(random.integers(1, 21))
    alone = bool(random.random() < 0.3) if alone is None else alone
    most = 1 if alone else int(random.choice([3, 15, MOST_ROWS // num_rows]))
    counts, starts = random.integers(1, most + 1, num_rows), random.integers(0, 60, num_rows)
    needed = -(-(starts + counts) // block_size)
    order = random.permutation(int(needed.sum()) + int(random.integers(0, 3))).astype(np.int32)
    tables = np.full((num_rows, int(needed.max())), -1, dtype=np.int32)
    for row, first in enumerate(np.cumsum(needed) - needed):
        tables[row, : needed[row]] = order[first : first + needed[row]]
    return Batch(starts, counts, tables, block_size, order.size)


def a_tree(random: Random, batch: Batch, window: int | None) -> TreeMask:
    """Trees at the end of some rows."""
    positions, seen = batch.positions, np.zeros(batch.positions.size, dtype=np.uint64)
    bases, first = np.full(batch.counts.size, NO_TREE), np.cumsum(batch.counts) - batch.counts
    for row in np.flatnonzero(random.random(batch.counts.size) < 0.6).tolist():
        nodes = int(random.integers(1, min(64, int(batch.counts[row])) + 1))
        token = int(first[row] + batch.counts[row]) - nodes
        bases[row] = batch.starts[row] + batch.counts[row] - nodes
        paths: list[list[int]] = []
        for node in range(nodes):
            parent = int(random.integers(-1, node)) if node else -1
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            positions[token + node] = bases[row] + len(paths[node]) - 1
            for each_node in paths[node] if window is None else paths[node][-window:]:
                seen[token + node] |= np.uint64(1 << each_node)
    return TreeMask(bases, seen, positions)


def reference(
    query: Tensor,
    caches: Pair,
    batch: Batch,
    window: int | None,
    tree: TreeMask | None,
    random: Random,
    rule: dict,
) -> tuple[Tensor, Tensor]:
    """Some tokens and what they attend to."""
    tokens = random.permutation(query.shape[0])[:CHECKED]
    last = batch.positions[tokens] + 1
    behind = last if tree is None else tree.positions[tokens] + 1
    first = np.zeros_like(last) if window is None else np.maximum(0, behind - window)
    items = torch.from_numpy(np.stack((tokens, batch.owners[tokens], first, last), axis=1).astype(np.int32))
    found = paged_attention_reference(query, *caches, torch.from_numpy(batch.tables), items, tree=tree, **rule)
    places = torch.from_numpy(tokens)
    return places, found[places]


def attended(random: Random) -> None:
    """`attend`, of heads up to the widest latent vectors, with windows, trees, sinks and soft caps."""
    function = cpu.load()
    assert function is not None
    batch, kv_heads, size = a_batch(random), int(random.integers(1, 4)), 16 * int(random.integers(1, 17))
    if random.random() < 0.25:
        size = 16 * int(random.integers(17, 65))
    heads, kind = kv_heads * int(random.integers(1, 10)), list(CELLS)[int(random.integers(0, len(CELLS)))]
    window = int(random.integers(1, 40)) if random.random() < 0.4 else None
    tree = a_tree(random, batch, window) if random.random() < 0.4 else None
    sinks = floats(random, heads) if random.random() < 0.3 else None
    softcap = 0.8 if random.random() < 0.3 else 0.0
    caches = tuple(
        kv_quant.encode(floats(random, batch.num_blocks, kv_heads, batch.block_size, size), kind) for _ in range(2)
    )
    tokens = batch.positions.size
    query = floats(random, tokens, heads + int(random.integers(0, 2)), size)[:, :heads]
    plan = batch.plan(kv_heads, window, by_token=bool(random.random() < 0.2), tree=tree)
    layer = CppAttention(function, heads, kv_heads, size, size**-0.5, softcap=softcap, sinks=sinks)
    found = layer.attend(query, (caches[0], caches[1]), plan)
    rule = {"scale": size**-0.5, "softcap": softcap, "sinks": sinks}
    places, expected = reference(query, (caches[0], caches[1]), batch, window, tree, random, rule)
    near(found[places], expected, 1e-4 if kind == torch.float32 else cpu.ROUNDED)


def written_and_attended(random: Random) -> None:
    """`write_and_attend`, with norms and rotations."""
    function = cpu.load()
    assert function is not None
    batch, kv_heads, size = a_batch(random), int(random.integers(1, 4)), 16 * int(random.integers(1, 17))
    heads, kind = kv_heads * int(random.integers(1, 10)), list(CELLS)[int(random.integers(0, len(CELLS)))]
    window = int(random.integers(1, 40)) if random.random() < 0.4 else None
    tokens, half = batch.positions.size, int(random.integers(0, size // 2 + 1))
    norms = (floats(random, size), floats(random, size)) if random.random() < 0.5 else None
    layer = CppAttention(function, heads, kv_heads, size, size**-0.5, rotation=Rotation(norms, 1e-5, 2 * half))
    angles = (floats(random, tokens, 1, half), floats(random, tokens, 1, half)) if half else None
    first, second = (
        kv_quant.encode(floats(random, batch.num_blocks, kv_heads, batch.block_size, size), kind) for _ in range(2)
    )
    expected, rows = (first.clone(), second.clone()), batch.rows(kv_heads)
    projected = floats(random, tokens, (heads + 2 * kv_heads) * size)
    query, key, value = projected.clone().view(tokens, -1, size).split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query, key = (functional.rms_norm(x, (size,), norm, 1e-5) for x, norm in zip((query, key), norms, strict=True))
    if angles is not None:
        query, key = (rope_reference(x, *angles) for x in (query, key))
    kv_write(key, value, *expected, rows)
    plan = batch.plan(kv_heads, window, by_token=bool(random.random() < 0.2))
    found = layer.write_and_attend(projected, (first, second), plan, rows, angles)
    near(kv_quant.decode(second, torch.float32), kv_quant.decode(expected[1], torch.float32), 1e-6)
    rule = {"scale": size**-0.5}
    places, wanted = reference(query, (first, second), batch, window, None, random, rule)
    near(found.view(tokens, heads, size)[places], wanted, 1e-4 if kind == torch.float32 else cpu.ROUNDED)


class Model:
    """Layers of random sizes, with what a decode step needs."""

    def __init__(self, random: Random) -> None:
        function = cpu.load()
        assert function is not None
        self.kv_heads, self.size = int(random.integers(1, 4)), 16 * int(random.integers(1, 17))
        kind = str(random.choice(["float32", "int8", "blocks"]))
        if kind == "blocks":  # of 32 inputs
            self.kv_heads, self.size = 2 * self.kv_heads, 16 * int(random.integers(1, 9))
        self.heads, self.hidden = self.kv_heads * int(random.integers(1, 5)), int(random.integers(1, 100))
        inner = 16 * int(random.integers(1, 80))
        if kind == "blocks":
            self.hidden, inner = 32 * (1 + self.hidden // 32), 32 * (1 + inner // 32)
        self.half = int(random.choice([0, self.size // 4, self.size // 2]))
        self.windows = (None, int(random.integers(1, 40)))
        self.rotations = [(floats(random, 200, 1, self.half), floats(random, 200, 1, self.half))] if self.half else []
        width, kv_width = self.heads * self.size, self.kv_heads * self.size

        def gains(size: int) -> Tensor | None:
            return floats(random, size) if random.random() < 0.7 else None

        def product(outs: int, ins: int):
            return some_product(random, outs, ins, kind)

        self.parts = [
            FusedLayerWeights(
                gains(self.hidden),
                product(width + 2 * kv_width, self.hidden),
                CppAttention(
                    function,
                    self.heads,
                    self.kv_heads,
                    self.size,
                    self.size**-0.5,
                    rotation=Rotation(None, 0.0, 2 * self.half),
                ),
                int(random.integers(0, 2)),
                0,
                product(self.hidden, width),
                gains(self.hidden),
                product(2 * inner, self.hidden),
                product(self.hidden, inner),
                str(random.choice(["silu", "gelu_tanh"])),
                1e-5,
                0.5,
            )
            for _ in range(int(random.integers(1, 4)))
        ]
        self.vocab = int(random.integers(1, 150))
        self.head = product(self.vocab, self.hidden)
        tokens = int(random.integers(self.vocab, 160))
        self.embedding: Tensor | BlockProduct = floats(random, tokens, self.hidden)
        if kind == "blocks":
            vectors = pack(some_blocks(random, tokens, self.hidden)).fast
            assert isinstance(vectors, BlockProduct)
            self.embedding = vectors
        self.norm = floats(random, self.hidden)
        self.together = decoder_layers.decoder_layers(self.parts)

    @property
    def in_blocks(self) -> bool:
        return isinstance(self.embedding, BlockProduct)

    @property
    def tokens(self) -> int:
        return self.embedding.out_features if self.in_blocks else self.embedding.shape[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding.rows(token_ids) if self.in_blocks else self.embedding[token_ids]

    @property
    def layers(self) -> DecoderLayers:
        assert self.together is not None
        return self.together

    def caches(self, random: Random, batch: Batch) -> list[Pair]:
        kind = list(CELLS)[int(random.integers(0, len(CELLS)))]
        shape = (batch.num_blocks, self.kv_heads, batch.block_size, self.size)
        return [
            (kv_quant.encode(floats(random, *shape), kind), kv_quant.encode(floats(random, *shape), kind))
            for _ in self.parts
        ]

    def one_by_one(
        self, residual: Tensor, batch: Batch, caches: list[Pair], positions: Tensor, keep: Tensor | None
    ) -> Tensor:
        """The layers by calls of each part."""
        rows = batch.rows(self.kv_heads)
        for number, (layer, cache) in enumerate(zip(self.parts, caches, strict=True)):
            plan = batch.plan(self.kv_heads, self.windows[layer.view])
            angles = (self.rotations[0][0][positions], self.rotations[0][1][positions]) if self.half else None
            products = [product.native for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
            qkv, out, gate_up, down = (product for product in products if product is not None)
            projected = qkv.linear(residual, layer.attention_norm, layer.eps, None, 1.0)
            mixed = layer.attention.write_and_attend(projected, cache, plan, rows, angles)
            if keep is not None and number == len(self.parts) - 1:
                mixed, residual = mixed[keep], residual[keep]
            out.linear(mixed, None, 0.0, residual, layer.multiplier)
            gated = gate_up.gated(residual, layer.feed_forward_norm, layer.eps, layer.activation)
            down.linear(gated, None, 0.0, residual, layer.multiplier)
        return residual


def together(random: Random, model: Model) -> None:
    """`decoder_layers`, going on with 0 to rows + 1 of the rows."""
    batch = a_batch(random)
    tokens = batch.positions.size
    caches = model.caches(random, batch)
    copies = [(keys.clone(), values.clone()) for keys, values in caches]
    residual, positions = floats(random, tokens, model.hidden), torch.from_numpy(batch.positions)
    keep = None
    if random.random() < 0.7:
        kept = tokens + 1 if random.random() < 0.4 else int(random.integers(0, tokens + 2))
        keep = torch.from_numpy(random.integers(0, tokens, kept))
    expected = model.one_by_one(residual.clone(), batch, copies, positions, keep)
    views = [(batch.plan(model.kv_heads, window), batch.rows(model.kv_heads)) for window in model.windows]
    near(model.layers.run(residual, positions, views, model.rotations, caches, keep), expected, 1e-4)


def stepped(random: Random, model: Model) -> None:
    """`decode_step`, of rows in slots of their own."""
    batch, slots = a_batch(random, alone=True), int(random.integers(6, 20))
    caches = model.caches(random, batch)
    copies = [(keys.clone(), values.clone()) for keys, values in caches]
    ends = decode_step.Ends(model.embedding, 1.5, model.norm, 1e-5, model.head)
    codes = token_codes(model.vocab, torch.device("cpu"))
    views = [(0, window or 0) for window in model.windows]
    step = decode_step.decode_step(model.layers, model.rotations, caches, ends, views, codes)
    functions = sampling.compiled()
    assert step is not None
    assert functions is not None
    count, longest = batch.starts.size, int(batch.starts.max()) + 2
    where, last = random.permutation(slots)[:count], random.integers(0, model.tokens, count)
    tokens, lengths = np.zeros((slots, longest), dtype=np.int32), np.ones(slots, dtype=np.int64)
    tokens[where, batch.starts], lengths[where] = last, batch.starts + 1
    blocks = np.full((1, slots, batch.tables.shape[1]), -1, dtype=np.int32)
    blocks[0, where] = batch.tables
    num_blocks = np.zeros((1, slots), dtype=np.int64)
    num_blocks[0, where] = batch.starts // batch.block_size + 1
    columns, chosen = options(random, 9), random.integers(0, 9, count)
    memory = decode_step.RowMemory(tokens, lengths, blocks, num_blocks)
    found = step.run(memory, columns, where, chosen, batch.starts.tolist())
    residual = model.embed(torch.from_numpy(last)) * 1.5
    hidden = model.one_by_one(residual, batch, copies, torch.from_numpy(batch.starts), None)
    assert model.head.native is not None
    near(step.logits[:count], model.head.native.linear(hidden, model.norm, 1e-5, None, 1.0), 1e-3)
    logits = step.logits[:count].contiguous()
    assert found == functions.choose(logits, columns, chosen, batch.starts + 1, codes)[0].tolist()
    assert tokens[where, batch.starts + 1].tolist() == found
    assert lengths[where].tolist() == (batch.starts + 2).tolist()


def a_model(random: Random) -> Model:
    """One whose layers are one call: oneDNN lays a few small weights out in a way that compiled code does not read."""
    models = (Model(random) for _ in range(20))
    return next(model for model in models if model.together is not None and model.head.native is not None)


def with_model(use: Callable[[Random, Model], None]) -> Calls:
    """One model for every ten calls."""

    def calls(random: Random, count: int) -> None:
        model = a_model(random)
        for number in range(count):
            if number % 10 == 9:
                model = a_model(random)
            use(random, model)

    return calls


DECODERS: dict[str, Calls] = {
    "paged_attention": each(attended),
    "paged_attention of written keys": each(written_and_attended),
    "decoder_layers": with_model(together),
    "decode_step": with_model(stepped),
}
