"""Weights in fewer bits: the kinds, their definitions, and the ways to compute with them.

A kind's `dequantize` and `product` are its definition. `kernels.linear.pack` takes any of them and looks here for a
fast path; where there is none, the weight is dequantized once.
"""

from troupellm.kernels.quantized_linear.base import QuantizedWeight, Unmergeable
from troupellm.kernels.quantized_linear.dispatch import FastProduct, FewRows, fast_product
from troupellm.kernels.quantized_linear.footprint import held_bytes, in_blocks, stays
from troupellm.kernels.quantized_linear.fp8 import Fp8
from troupellm.kernels.quantized_linear.gguf import GgufBlocks
from troupellm.kernels.quantized_linear.gguf_mixture import GgufMixture
from troupellm.kernels.quantized_linear.grouped import Int4Group, Int8WeightOnly
from troupellm.kernels.quantized_linear.int8 import Int8Channel
from troupellm.kernels.quantized_linear.merge import Weight, merge
from troupellm.kernels.quantized_linear.mx import Mx
from troupellm.kernels.quantized_linear.outline import Outline
from troupellm.kernels.quantized_linear.table4 import Table4

__all__ = [
    "FastProduct", "FewRows", "Fp8", "GgufBlocks", "GgufMixture", "Int4Group", "Int8Channel", "Int8WeightOnly", "Mx",
    "Outline", "QuantizedWeight", "Table4", "Unmergeable", "Weight", "fast_product", "held_bytes", "in_blocks", "merge",
    "stays",
]  # fmt: skip
