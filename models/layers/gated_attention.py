"""Attention whose result is multiplied by the sigmoid of one more projection, as in Qwen3-Next."""

import torch
from torch import Tensor

from troupellm.kernels.linear import QuantizedRows, linear, pack
from troupellm.kernels.quantized_linear import Weight
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.checkpoint.weight_names import RenamedWeights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.attention import Angles, Attention, KVPair
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.projections import rows_of


class GatedAttention(Attention):
    """The checkpoint has each head's query and gate beside each other in `q_proj`."""

    def __init__(self, config: DecoderConfig, layer: int, prefix: str, source: WeightSource) -> None:
        shape = config.layers[layer]
        whole = source.linear(f"{prefix}.q_proj", (2 * shape.query_width, config.hidden_size))
        rows = torch.arange(2 * shape.query_width).view(shape.num_heads, 2, shape.head_dim)
        super().__init__(
            config, layer, prefix, _Queries(source, f"{prefix}.q_proj", rows_of(whole, rows[:, 0].flatten()))
        )
        self.gate = pack(rows_of(whole, rows[:, 1].flatten()), None)
        self.codes, self.adds = None, False

    def __call__(
        self,
        hidden: Tensor | QuantizedRows,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None,
    ) -> Tensor:
        """As `SelfAttention`."""
        assert isinstance(hidden, Tensor)
        attended = self._mixed(linear(hidden, self.qkv), batch, angles, cache, keep)
        gate = linear(hidden if keep is None else hidden[keep], self.gate)
        return linear(attended * gate.sigmoid_(), self.out)


class _Queries(RenamedWeights):
    """A source in which the projection to queries has these rows alone."""

    def __init__(self, source: WeightSource, name: str, queries: Weight) -> None:
        super().__init__(source, str)
        self._name, self._queries = name, queries

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.linear`."""
        return self._queries if name == self._name else super().linear(name, shape)
