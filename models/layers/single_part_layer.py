"""A decoder's layer that is one part behind one norm, as in Mamba-2 and Nemotron-H."""

from torch import Tensor

from troupellm.kernels.fused_decoder.layers import FusedLayerWeights
from troupellm.kernels.rms_norm import add_rms_norm, rms_norm
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.attention import Angles, KVPair, SelfAttention
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.layer_norm_block import UngatedFeedForward
from troupellm.models.layers.mixers import make_mixer
from troupellm.models.layers.norm import take_norm


class SinglePartLayer:
    """As `DecoderLayer`, of a model with `single_parts`."""

    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource) -> None:
        shape, prefix = config.layers[layer], f"model.layers.{layer}"
        self._eps = config.rms_norm_eps
        self._norm = take_norm(config, source, f"{prefix}.norm", config.hidden_size)
        self.attention: SelfAttention | UngatedFeedForward
        """The layer's part."""
        if shape.mixer == "none":
            self.attention = UngatedFeedForward(config, "relu2", f"{prefix}.mlp", source, shape.intermediate_size)
        else:
            self.attention = make_mixer(config, layer, source)

    def __call__(
        self,
        update: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """As `DecoderLayer`."""
        if update is None:
            hidden = rms_norm(residual, self._norm, self._eps)
        else:
            hidden = add_rms_norm(update, residual, self._norm, self._eps)
        kept = residual if keep is None else residual[keep]
        if isinstance(self.attention, UngatedFeedForward):
            return self.attention(hidden if keep is None else hidden[keep], kept.shape[0]), kept
        return self.attention(hidden, batch, angles, cache, keep), kept

    def parts(self, rotation: int | None) -> FusedLayerWeights | None:
        """None: compiled code has no layer of this form."""
        return None
