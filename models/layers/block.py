"""One layer of a decoder."""

from functools import partial

import torch
from torch import Tensor

from troupellm.kernels.fused_decoder.layers import FusedLayerWeights
from troupellm.kernels.linear import QuantizedRows
from troupellm.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from troupellm.models.adapters.batch import AdapterBatch
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.attention import Angles, Attention, KVPair
from troupellm.models.layers.experts import Experts
from troupellm.models.layers.feed_forward import FeedForward, make_feed_forward
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.mixers import make_mixer
from troupellm.models.layers.norm import take_norm


class DecoderLayer:
    """Attention and feed-forward beside the residual, with norms before them, behind them, or both.

    A part adds itself to the residual where its first product can begin with the norm and its last one end with the
    sum. Otherwise it leaves an update, which the next norm takes in.
    """

    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource) -> None:
        def norm(name: str | None) -> Tensor | None:
            if name is None:
                return None
            return take_norm(config, source, f"model.layers.{layer}.{name}", config.hidden_size)

        self.number, self.eps, self.multiplier = layer, config.rms_norm_eps, config.residual_multiplier
        self.before_attention = norm(config.norms.before_attention)
        self.attention = make_mixer(config, layer, source)
        self.after_attention = norm(config.norms.after_attention)
        self.before_feed_forward = norm(config.norms.before_feed_forward)
        self.feed_forward = make_feed_forward(config, layer, source)
        self.after_feed_forward = norm(config.norms.after_feed_forward)
        attention, feed_forward = self.attention, self.feed_forward
        self._adding_attention = (
            attention if isinstance(attention, Attention) and attention.adds and self.after_attention is None else None
        )
        self._adding_feed_forward = (
            feed_forward
            if isinstance(feed_forward, FeedForward) and feed_forward.adds and self.after_feed_forward is None
            else None
        )

    def __call__(
        self,
        update: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """One layer.

        Args:
            update: [rows, hidden], the previous layer's addition to the residual; None if it is added already.
            residual: [rows, hidden]; changed in place.
            angles: of the layer's rotation; None is none.
            keep: int64 [kept], the rows to go on with after the attention; None is all.

        Returns:
            this layer's update and the residual, [rows, hidden] or [kept, hidden].
        """
        if batch.adapters is not None:
            return self._adapted(batch.adapters, update, residual, batch, angles, cache, keep)
        tokens = batch.token_ids.shape[0] if keep is None else keep.shape[0]
        if self._adding_attention is not None:
            residual = _sum(update, residual)
            attended = self._adding_attention.attended(residual, self.before_attention, batch, angles, cache, keep)
            residual = residual if keep is None else residual[keep]
            self._adding_attention.add(attended, residual, self.multiplier)
            update = None
        else:
            attended = self._attended(update, residual, batch, angles, cache, keep)
            update = self._weighed(attended, self.after_attention)
            residual = residual if keep is None else residual[keep]
        if self._adding_feed_forward is not None:
            residual = _sum(update, residual)
            self._adding_feed_forward.add(residual, self.before_feed_forward, self.eps, self.multiplier)
            return None, residual
        return self._weighed(self._fed(update, residual, tokens), self.after_feed_forward), residual

    def parts(self, rotation: int | None) -> FusedLayerWeights | None:
        """The parts from which compiled code computes all layers of a step; None if this layer has another form.

        Args:
            rotation: number of the layer's rotation; None if it has none.
        """
        attention, feed_forward = self._adding_attention, self._adding_feed_forward
        if attention is None or feed_forward is None or attention.native is None or not attention.plain:
            return None
        return FusedLayerWeights(
            attention_norm=self.before_attention,
            qkv=attention.qkv,
            attention=attention.native,
            view=attention.view,
            rotation=rotation or 0,
            out=attention.out,
            feed_forward_norm=self.before_feed_forward,
            gate_up=feed_forward.gate_up,
            down=feed_forward.down,
            activation=feed_forward.activation,
            eps=self.eps,
            multiplier=self.multiplier,
        )

    def _adapted(
        self,
        adapters: AdapterBatch,
        update: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        """As `__call__`, with the float input of every product that adapters add to."""
        hidden = self._added(update, residual, self.before_attention)
        update = self._weighed(self.attention(hidden, batch, angles, cache, keep), self.after_attention)
        residual = residual if keep is None else residual[keep]
        hidden, part = self._added(update, residual, self.before_feed_forward), self.feed_forward
        if isinstance(part, FeedForward):
            fed = part.adapted(hidden, partial(adapters.add, self.number, kept=keep is not None))
        else:
            tokens = batch.token_ids.shape[0] if keep is None else keep.shape[0]
            add = adapters.experts(self.number, tokens, kept=keep is not None)
            fed = part(hidden, tokens) if add is None or not isinstance(part, Experts) else part(hidden, tokens, add)
        return self._weighed(fed, self.after_feed_forward), residual

    def _attended(
        self,
        update: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None,
    ) -> Tensor:
        part, norm = self.attention, self.before_attention
        if isinstance(part, Attention) and part.codes is not None and norm is not None:
            return part(self._quantized(update, residual, norm, part.codes), batch, angles, cache, keep)
        return part(self._added(update, residual, norm), batch, angles, cache, keep)

    def _fed(self, update: Tensor | None, residual: Tensor, tokens: int) -> Tensor:
        part, norm = self.feed_forward, self.before_feed_forward
        if isinstance(part, FeedForward) and part.codes is not None and norm is not None:
            return part(self._quantized(update, residual, norm, part.codes), tokens)
        return part(self._added(update, residual, norm), tokens)

    def _quantized(self, update: Tensor | None, residual: Tensor, norm: Tensor, codes: torch.dtype) -> QuantizedRows:
        """As `_added`, for a product that puts its inputs into eight bits."""
        if update is None:
            return QuantizedRows(*rms_norm_quantized(residual, norm, self.eps, codes), residual.dtype)
        return QuantizedRows(*rms_norm_quantized(update, norm, self.eps, codes, residual=residual), residual.dtype)

    def _added(self, update: Tensor | None, residual: Tensor, norm: Tensor | None) -> Tensor:
        """The residual with the update in it, which is written back, behind the norm where there is one."""
        if update is None or norm is None:
            residual = _sum(update, residual)
            return residual if norm is None else rms_norm(residual, norm, self.eps)
        return add_rms_norm(update, residual, norm, self.eps)

    def _weighed(self, update: Tensor, norm: Tensor | None) -> Tensor:
        """An update as the residual gets it."""
        if norm is not None:
            update = rms_norm(update, norm, self.eps)
        return update if self.multiplier == 1.0 else update.mul_(self.multiplier)


def _sum(update: Tensor | None, residual: Tensor) -> Tensor:
    """The residual with the update in it, in place."""
    return residual if update is None else residual.add_(update)
