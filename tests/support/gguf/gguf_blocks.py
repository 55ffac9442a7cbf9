"""Random blocks of every type of GGUF files that is read, and hostile ones."""

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Bytes at which float16 numbers begin: the scale and, where there is one, the factor of minima."""
NIBBLES = {"IQ1_M": (49, 51, 53, 55)}
"""Bytes whose upper halves are a float16, the lowest four bits first."""
HOSTILE = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0], dtype=np.float16)
"""Scales: zeros, subnormal numbers, the largest ones."""


def dequantized(data: Bytes, layout: str) -> NDArray[np.float32]:
    """As the format's own package reads it."""
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[layout])


def with_numbers(data: Bytes, layout: str, place: int, numbers: NDArray[np.float16]) -> Bytes:
    """Blocks with other float16 numbers, one for each block: the scale (place 0) or the factor of minima (1)."""
    data, words = data.copy(), numbers.view(np.uint16)
    if layout in NIBBLES:
        for index, at in enumerate(NIBBLES[layout]):
            data[:, at] = (data[:, at] & 15) | ((words >> 4 * index) & 15) << 4
    else:
        at = SCALES[layout][place]
        data[:, at : at + 2] = words[:, None].view(np.uint8)
    return data


def hostile_blocks(layout: str, count: int, seed: int = 0) -> Bytes:
    """[count, bytes]: any bytes, of which some blocks are all zeros or all ones, with the hostile scales."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[layout]][1]), dtype=np.uint8)
    data[: count // 8], data[count // 8 : count // 4] = 0, 255
    for place in range(len(SCALES.get(layout, NIBBLES.get(layout, ())[:1]))):
        data = with_numbers(data, layout, place, random.choice(HOSTILE, count))
    return data


def random_blocks(shape: tuple[int, int], layout: str, deviation: float = 0.05, seed: int = 0) -> Bytes:
    """[rows, bytes of a row] of weights with a mean near 0 and about this standard deviation."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[layout]]
    count, random = shape[0] * shape[1] // weights, np.random.default_rng(seed)
    data = random.integers(0, 256, (count, size), dtype=np.uint8)
    if layout == "MXFP4":  # twice the float of four bits deviates by 4.8
        exponent = round(128 + np.log2(deviation / 4.8))
        data[:, 0] = random.integers(exponent - 1, exponent + 2, count)
        return data.reshape(shape[0], -1)
    one, none = np.ones(count, np.float16), np.zeros(count, np.float16)
    numbers = [one]
    if len(SCALES.get(layout, ())) > 1:
        scaled = dequantized(with_numbers(with_numbers(data, layout, 0, one), layout, 1, none), layout)
        minima = dequantized(with_numbers(with_numbers(data, layout, 0, none), layout, 1, one), layout)
        numbers.append((one * -scaled.mean() / minima.mean()).astype(np.float16))
    for factor in (1.0, None):
        if factor is None:
            factor = deviation / dequantized(data, layout).std()
        for place, number in enumerate(numbers):
            data = with_numbers(data, layout, place, (number * factor).astype(np.float16))
    return data.reshape(shape[0], -1)
