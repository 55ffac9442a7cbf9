"""Weights of every quantized kind."""

import torch

from troupellm.kernels.quantized_linear import (
    Fp8,
    GgufBlocks,
    Int4Group,
    Int8Channel,
    Int8WeightOnly,
    Mx,
    QuantizedWeight,
    Table4,
)
from troupellm.kernels.quantized_linear.mx import element_values

ROWS, COLUMNS = 96, 256


def weight(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))


def random_bytes(rows: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, size), generator=generator, dtype=torch.uint8)


def gguf(layout: str, size: int, scales: tuple[int, ...], seed: int = 0, rows: int = ROWS) -> GgufBlocks:
    """Random blocks, but with float16 scales (at these bytes) that are numbers."""
    data = random_bytes(rows, COLUMNS // {34: 32, 18: 32}.get(size, 256) * size, seed).view(-1, size)
    for at in scales:
        data[:, at : at + 2] = torch.full((data.shape[0], 1), 0.01 + at / 1000).half().view(torch.uint8)
    return GgufBlocks(data.view(rows, -1), layout)


def table4(table: torch.Tensor, run: int, seed: int = 0, rows: int = ROWS) -> Table4:
    """Random codes; every scale is another one."""
    scale = torch.rand(rows, COLUMNS // run, generator=torch.Generator().manual_seed(seed)) / 50
    return Table4(random_bytes(rows, COLUMNS // 2, seed), table, scale)


def kinds(seed: int = 0, rows: int = ROWS) -> dict[str, QuantizedWeight]:
    plain = weight(seed, rows)
    exponents = torch.randint(120, 130, (rows, COLUMNS // 32), dtype=torch.uint8)
    return {
        "int8": Int8Channel.quantize(plain),
        "int8_weight_only": Int8WeightOnly.quantize(plain),
        "int8_groups": Int8WeightOnly.quantize(plain, 64),
        "int4": Int4Group.quantize(plain, 32),
        "fp8": Fp8.quantize(plain),
        "fp8_tensor": Fp8(plain.to(torch.float8_e4m3fn), torch.tensor(0.5)),
        "fp8_tiles": Fp8(plain.to(torch.float8_e4m3fn), torch.rand(-(-rows // 32), 4), block=(32, 64)),
        "mxfp4": Mx(random_bytes(rows, COLUMNS // 2, seed), exponents, "fp4_e2m1"),
        "mxfp6": Mx(random_bytes(rows, COLUMNS, seed) & 63, exponents, "fp6_e3m2"),
        "nvfp4": table4(element_values("fp4_e2m1"), 16, seed, rows),
        "q8_0": gguf("Q8_0", 34, (0,), seed, rows),
        "q4_0": gguf("Q4_0", 18, (0,), seed, rows),
        "q4_k": gguf("Q4_K", 144, (0, 2), seed, rows),
        "q6_k": gguf("Q6_K", 210, (208,), seed, rows),
    }
