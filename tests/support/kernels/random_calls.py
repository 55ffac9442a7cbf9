"""Calls of every compiled function with random sizes, each compared with a reference.

With `TROUPE_NATIVE=asan` or `TROUPE_GUARD=1` they also show that no function leaves its memory. A case is made of a
seed; what takes long to make (weights) is made once for a few cases.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.act_quant.reference import quantize_groups, rounded_groups
from troupellm.kernels.linear import PackedLinear, pack
from troupellm.kernels.linear.cpu import CppWeight
from troupellm.kernels.low_rank.native import low_rank_native
from troupellm.kernels.low_rank.reference import low_rank_reference
from troupellm.kernels.low_rank.weights import LowRankWeights, grouped_rows
from troupellm.kernels.quantized_linear import (
    GgufBlocks,
    Int4Group,
    Int8Channel,
    QuantizedWeight,
    cpu_blocks,
    cpu_int8,
    cpu_packed,
)
from troupellm.kernels.quantized_linear.cpu_rows import CppRows
from troupellm.kernels.quantized_linear.gguf import LARGEST, PACKED_BYTES, InputBits
from troupellm.kernels.quantized_linear.grouped import Int8WeightOnly
from troupellm.kernels.quantized_linear.int8 import INPUT_GROUP
from troupellm.kernels.quantized_linear.packed_weights import packed_weight
from troupellm.kernels.sampling import cpu as sampling
from troupellm.kernels.sampling.adjust import unpacked
from troupellm.kernels.sampling.noise import log_exponential, position_keys, token_codes
from troupellm.tests.support.gguf.gguf_blocks import random_blocks

Random = np.random.Generator
MOST_ROWS = 130


POOL = np.random.default_rng(7).standard_normal(1 << 18, dtype=np.float32)


def floats(random: Random, *shape: int) -> Tensor:
    """Normal numbers: a part of `POOL`, since many calls take more time to make numbers than to compute."""
    begin = int(random.integers(0, POOL.size))
    return torch.from_numpy(np.resize(POOL[begin:], shape))


def apart(random: Random, x: Tensor) -> Tensor:
    """The same matrix, whose rows may lie further from each other than they are long."""
    behind = int(random.integers(0, 4))
    wider = torch.full((x.shape[0], x.shape[1] + behind), torch.nan)
    wider[:, : x.shape[1]] = x
    return wider[:, : x.shape[1]]


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare with a tolerance that grows with the largest number."""
    assert found.shape == expected.shape
    most = float(expected.abs().max()) if expected.numel() else 0.0
    assert torch.allclose(found, expected, atol=tolerance * max(1.0, most), rtol=0.0)


Weight = tuple[CppWeight | CppRows, Callable[[Tensor], Tensor], float]
"""A compiled product, its reference, and how far from it the result may be."""


def float_weight(random: Random) -> Weight:
    outs, depth = (int(size) for size in random.integers(1, 200, 2))
    outs = outs // 32 * 32 or outs if random.random() < 0.5 else outs
    weight, bias = floats(random, outs, depth), floats(random, outs) if random.random() < 0.5 else None
    packed = pack(weight, bias)
    if outs == 1 and packed.native is None:  # oneDNN keeps some weights of one output in a layout of its own
        return float_weight(random)
    assert isinstance(packed.native, CppWeight)
    packed.native.most_rows = int(random.choice([16, 64, 4096]))
    return packed.native, lambda x: functional.linear(x, weight, bias), 1e-5


def int8_weight(random: Random) -> Weight:
    outs, depth = (int(size) for size in random.integers(1, (200, 400)))
    outs = outs // 32 * 32 or outs if random.random() < 0.5 else outs
    weight = Int8Channel.quantize(floats(random, outs, depth))
    bias = floats(random, outs) if random.random() < 0.5 else None
    product = cpu_int8.Int8Product(weight, bias)
    assert product.native is not None
    return product.native, lambda x: weight.product(x, bias), 0.02


def coded_weight(random: Random) -> Weight:
    outs, groups = int(random.integers(1, 130)), int(random.integers(1, 5))
    outs = outs // 32 * 32 or outs if random.random() < 0.5 else outs
    plain = floats(random, outs, 32 * groups)
    weight: QuantizedWeight = Int4Group.quantize(plain, 32)
    if random.random() < 0.5:
        weight = Int8WeightOnly.quantize(plain)
    codes, functions = packed_weight(weight), cpu_packed.load()
    assert codes is not None
    assert functions is not None
    bias = floats(random, outs) if random.random() < 0.5 else None
    return cpu_packed.PackedProduct(functions, codes, weight.shape, bias), lambda x: weight.product(x, bias), 1e-4


def block_weight(random: Random) -> Weight:
    """Of one type, or of two with one below the other; the first kinds take groups of 32 inputs, the others of 256."""
    bits: InputBits = 8 if random.random() < 0.5 else 15
    parts, most = [], int(random.integers(1, 3))
    names = [str(random.choice(list(PACKED_BYTES))) for _ in range(most)]
    depth = (
        256 * int(random.integers(1, 4))
        if any("K" in name or "XS" in name for name in names)
        else 32 * int(random.integers(1, 20))
    )
    for number, name in enumerate(names):
        outs = int(random.integers(1, 130))
        outs = outs // 16 * 16 or 16 if number + 1 < most or random.random() < 0.5 else outs
        data = torch.from_numpy(random_blocks((outs, depth), name, seed=int(random.integers(0, 1000))))
        parts.append(GgufBlocks(data, name, input_bits=bits))
    bias = floats(random, sum(part.shape[0] for part in parts)) if random.random() < 0.5 else None
    functions = cpu_blocks.load()
    assert functions is not None
    whole = torch.cat([part.dequantize() for part in parts])

    def product(x: Tensor) -> Tensor:
        return functional.linear(rounded_groups(x, LARGEST[bits]), whole, bias)

    # A norm that differs in its last bit moves some input to the next of its values.
    blocks = [cpu_blocks.Blocks(part.layout, part.data) for part in parts]
    return cpu_blocks.BlockProduct(functions, blocks, bias, fine=bits == 15), product, 0.02 if bits == 8 else 2e-4


def looked_up(random: Random, weight: Weight) -> None:
    """Rows of a weight in blocks."""
    native, reference, _ = weight
    assert isinstance(native, cpu_blocks.BlockProduct)
    index = torch.from_numpy(random.integers(0, native.out_features, int(random.integers(0, 40))))
    assert native.rows(index).shape == (index.numel(), native.in_features)
    unit = torch.zeros(1, native.in_features)
    unit[0, int(random.integers(0, native.in_features))] = 1.0
    zero = reference(torch.zeros_like(unit))
    near(native.rows(index) @ unit[0], (reference(unit) - zero)[0, index], 1e-5)


def a_product(random: Random, weight: Weight) -> None:
    """One call of `linear` and, where halves can be multiplied, one of `gated`."""
    native, reference, tolerance = weight
    rows = int(random.integers(0, MOST_ROWS + 1))
    x = apart(random, floats(random, rows, native.in_features))
    norm = floats(random, native.in_features) if random.random() < 0.5 else None
    ready = x if norm is None else functional.rms_norm(x, (native.in_features,), norm, 1e-5)
    expected = reference(ready)
    if random.random() < 0.5:
        residual = apart(random, floats(random, rows, native.out_features))
        wanted = residual + 0.5 * expected
        near(native.linear(x, norm, 1e-5, residual, 0.5), wanted, tolerance)
    else:
        near(native.linear(x, norm, 1e-5, None, 1.0), expected, tolerance)
    if native.gates:
        gate, up = expected.chunk(2, dim=-1)
        for name, function in (("silu", functional.silu), ("gelu_tanh", tanh_gelu)):
            near(native.gated(x, norm, 1e-5, name), function(gate) * up, 4 * tolerance)


def tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def decoded(random: Random, weight: Weight) -> None:
    """More rows than the compiled product takes: pieces of the weight are decoded."""
    native, reference, tolerance = weight
    assert isinstance(native, cpu_packed.PackedProduct)
    x = floats(random, int(random.integers(cpu_packed.MOST_ROWS + 1, MOST_ROWS + 1)), native.in_features)
    near(native(x), reference(x), tolerance)


def quantized_rows(random: Random) -> None:
    rows, size = int(random.integers(0, MOST_ROWS + 1)), int(random.integers(1, 300))
    x = apart(random, floats(random, rows, size))
    values, scale = cpu_int8.quantized_inputs(x)
    wanted, wanted_scale = quantize_groups(x, INPUT_GROUP)
    assert torch.equal(values, wanted)
    assert torch.equal(scale, wanted_scale)


def options(random: Random, slots: int) -> sampling.Columns:
    scales = np.where(random.random(slots) < 0.3, 0.0, random.random(slots) + 0.2)
    floors = np.where(random.random(slots) < 0.5, -np.inf, -4.0)
    return sampling.Columns(
        random.integers(-(2**63), 2**63, slots), scales.astype(np.float32), floors.astype(np.float32)
    )


def drawn(random: Random) -> None:
    """`draw`, `keep_bits` and `choose` of the same logits."""
    functions = sampling.compiled()
    assert functions is not None
    rows, vocab = int(random.integers(0, MOST_ROWS + 1)), int(random.integers(1, 400))
    logits, codes = floats(random, rows, vocab) * 3.0, token_codes(vocab, torch.device("cpu"))
    keys = position_keys(torch.arange(rows), torch.arange(rows))
    expected = (logits - log_exponential(codes, keys)).argmax(-1)
    assert torch.equal(functions.draw(apart(random, logits), keys, codes), expected)

    guided = torch.from_numpy(np.flatnonzero(random.random(rows) < 0.4))
    words = -(-vocab // 32) + int(random.integers(0, 2))
    bits = torch.from_numpy(random.integers(-(2**31), 2**31, (guided.numel(), words), dtype=np.int32))
    bits[:, 0] |= 1  # something is left
    masked = logits.index_copy(0, guided, logits[guided].masked_fill(~unpacked(bits, vocab), -torch.inf))
    kept = apart(random, logits)
    functions.keep_bits(kept, guided, bits)
    assert torch.equal(kept, masked)

    columns, slots = options(random, 40), random.integers(0, 40, rows)
    positions = random.integers(0, 2**40, rows)
    tokens, peaks = functions.choose(logits, columns, slots, positions, codes, guided, bits)
    streams, scales, floors = (torch.from_numpy(of[slots]) for of in (columns.streams, columns.scales, columns.floors))
    scores = (masked - masked.amax(-1, keepdim=True)) * scales[:, None]
    scores = scores.masked_fill(scores < floors[:, None], -torch.inf)
    keys = position_keys(streams, torch.from_numpy(positions))
    wanted = torch.where(scales == 0, masked.argmax(-1), (scores - log_exponential(codes, keys)).argmax(-1))
    assert torch.equal(tokens, wanted)
    assert torch.equal(peaks, logits.amax(-1))


def some_product(random: Random, outs: int, ins: int, kind: str) -> PackedLinear:
    """A weight in float32, int8 or blocks whose products keep numbers near 1; `ins` of blocks is a multiple of 32."""
    bias = floats(random, outs) if random.random() < 0.3 else None
    if kind == "blocks":
        return pack(some_blocks(random, outs, ins), bias)
    plain = floats(random, outs, ins) / ins**0.5
    return pack(Int8Channel.quantize(plain) if kind == "int8" else plain, bias)


def some_blocks(random: Random, outs: int, ins: int) -> GgufBlocks:
    """A weight of a type whose blocks are of 32 inputs."""
    name, seed = str(random.choice(["Q4_0", "Q5_1", "Q8_0"])), int(random.integers(0, 1000))
    return GgufBlocks(torch.from_numpy(random_blocks((outs, ins), name, ins**-0.5, seed)), name)


def with_weight(make: Callable[[Random], Weight], use: Sequence[Callable[[Random, Weight], None]]) -> "Calls":
    """Calls of products: one weight for every ten."""

    def calls(random: Random, count: int) -> None:
        weight = make(random)
        for number in range(count):
            if number % 10 == 9:
                weight = make(random)
            for one in use:
                one(random, weight)

    return calls


def each(one: Callable[[Random], None]) -> "Calls":
    def calls(random: Random, count: int) -> None:
        for _ in range(count):
            one(random)

    return calls


def low_rank(random: Random) -> None:
    """One call of `low_rank_add`."""
    groups, most, depth = (int(size) for size in random.integers(1, (5, 20, 80)))
    widths = tuple(int(width) for width in random.integers(1, 60, int(random.integers(1, 4))))
    weights = LowRankWeights(groups, most, depth, widths, torch.float32, torch.device("cpu"))
    for group in range(groups):
        rank = int(random.integers(0, most + 1))
        for part, width in enumerate(widths if rank else ()):
            bias = floats(random, width) if random.random() < 0.3 else None
            weights.put(group, part, floats(random, rank, depth), floats(random, width, rank), bias)
    count = int(random.integers(0, MOST_ROWS + 1))
    rows = grouped_rows(random.integers(-1, groups, count), groups, torch.from_numpy)
    x, out = apart(random, floats(random, count, depth)), apart(random, floats(random, count, sum(widths)))
    expected = out.clone()
    assert rows.host is not None
    low_rank_reference(x, weights, rows.host, expected)
    low_rank_native(x, weights, rows.host, out)
    near(out, expected, 1e-4)


Calls = Callable[[Random, int], None]
"""Makes so many calls of one binding."""

PRODUCTS: dict[str, Calls] = {
    "linear": with_weight(float_weight, (a_product,)),
    "int8_linear": with_weight(int8_weight, (a_product,)),
    "coded_linear": with_weight(coded_weight, (a_product, decoded)),
    "block_linear": with_weight(block_weight, (a_product, looked_up)),
    "int8_quantize": each(quantized_rows),
    "sampling": each(drawn),
    "low_rank": each(low_rank),
}
