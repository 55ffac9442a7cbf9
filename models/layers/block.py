"""One layer of a decoder."""

from torch import Tensor

from troupellm.kernels.rms_norm import add_rms_norm, rms_norm
from troupellm.models.checkpoint import WeightSource
from troupellm.models.decoder_config import DecoderConfig
from troupellm.models.forward_batch import ForwardBatch
from troupellm.models.layers.attention import Angles, KVPair, make_attention
from troupellm.models.layers.feed_forward import make_feed_forward
from troupellm.models.layers.norm import take_norm


class DecoderLayer:
    """Attention and feed-forward beside the residual, with norms before them, behind them, or both."""

    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource) -> None:
        def norm(name: str | None) -> Tensor | None:
            if name is None:
                return None
            return take_norm(config, source, f"model.layers.{layer}.{name}", config.hidden_size)

        self.eps, self.multiplier = config.rms_norm_eps, config.residual_multiplier
        self.before_attention = norm(config.norms.before_attention)
        self.attention = make_attention(config, layer, source)
        self.after_attention = norm(config.norms.after_attention)
        self.before_feed_forward = norm(config.norms.before_feed_forward)
        self.feed_forward = make_feed_forward(config, layer, source)
        self.after_feed_forward = norm(config.norms.after_feed_forward)

    def __call__(
        self,
        update: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One layer.

        Args:
            update: [rows, hidden], what the layer before adds to the residual.
            residual: [rows, hidden]; changed in place.
            angles: of the layer's rotation; None is none.
            keep: int64 [kept], the rows to go on with after the attention; None is all.

        Returns:
            this layer's update and the residual, [rows, hidden] or [kept, hidden].
        """
        hidden = self._added(update, residual, self.before_attention)
        attended = self._weighed(self.attention(hidden, batch, angles, cache, keep), self.after_attention)
        tokens = batch.token_ids.shape[0]
        if keep is not None:
            residual, tokens = residual[keep], keep.shape[0]
        hidden = self._added(attended, residual, self.before_feed_forward)
        return self._weighed(self.feed_forward(hidden, tokens), self.after_feed_forward), residual

    def _added(self, update: Tensor, residual: Tensor, norm: Tensor | None) -> Tensor:
        """The residual with the update in it, which is written back, behind the norm where there is one."""
        return residual.add_(update) if norm is None else add_rms_norm(update, residual, norm, self.eps)

    def _weighed(self, update: Tensor, norm: Tensor | None) -> Tensor:
        """An update as the residual gets it."""
        if norm is not None:
            update = rms_norm(update, norm, self.eps)
        return update if self.multiplier == 1.0 else update.mul_(self.multiplier)
