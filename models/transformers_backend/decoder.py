"""A model of `transformers` in the place of a decoder: flat batches in, keys and values in our blocks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from troupellm.kernels.common.batch_invariance import batch_invariance
from troupellm.models.checkpoint.next_token_tensors import next_token_tensors
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights, stored_names
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.weight_files import folder_weight_files
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import EMBEDDING
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.quantization.checkpoint import QuantizationFormat, QuantizedCheckpoint
from troupellm.models.transformers_backend import attention
from troupellm.models.transformers_backend.attention import PagedAnswer
from troupellm.models.transformers_backend.describe import body_name, body_of, hf_config, make_skeleton, prepared
from troupellm.models.transformers_backend.gguf import empty_model, fill
from troupellm.models.transformers_backend.linears import PackedLayer, pack_layers, with_layers
from troupellm.models.transformers_backend.pretrained import load_pretrained, refuse_tensors
from troupellm.models.transformers_backend.quantized import read_parts
from troupellm.protocol.config.setting_types import OnLoad
from troupellm.protocol.errors import ConfigError

STRETCHED = ("dynamic", "longrope")
"""Rotations that change with the longest position of a batch."""


class GivenOutput:
    """A body's output with hidden states alone; every other attribute is None."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None


class Given(Module):
    """Stands in the place of the model's body: the hidden states for the head are set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> GivenOutput:
        """The given hidden states, for any arguments."""
        return GivenOutput(self.hidden)

    def __getattr__(self, name: str) -> Any:
        """A part of the body, if a head calls one: the object itself stands in for it."""
        return super().__getattr__(name) if name.startswith("_") else self


class TransformersDecoder:
    """A model ready to run, by the same calls as `models.decoder.Decoder`."""

    score = None
    """There are no classifiers."""
    batch_invariant = False

    def __init__(self, config: DecoderConfig, model: Any, *, max_model_len: int) -> None:
        """
        Args:
            model: of `transformers`, with weights, whose attention is ours.
            max_model_len: longest sequence, which rotations are fixed for.
        """
        if batch_invariance():
            raise ConfigError("batch_invariant does not go with model_impl transformers", param="batch_invariant")
        self.config, self.model = config, model
        self.dtype: torch.dtype = model.dtype
        self.body, self._place = body_of(model), body_name(model)
        self.products = [layer.packed for layer in model.modules() if isinstance(layer, PackedLayer)]
        """Linear layers that are computed by our products."""
        self.head: Given | None = None
        """Stands in for the body, and gives the head its hidden states."""
        _fix_rotations(self.body, max_model_len)
        if config.head == "lm" and self._place is not None:
            self.head = Given()
            setattr(model, self._place, self.head)

    def forward(self, batch: ForwardBatch, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """As `Decoder.forward`."""
        inputs: dict[str, Tensor] = {"input_ids": batch.token_ids[None]}
        if batch.inputs is not None:
            places, values = batch.inputs
            embeddings = self.body.get_input_embeddings()(batch.token_ids).clone()
            embeddings[places] = values.to(embeddings.dtype)
            inputs = {"inputs_embeds": embeddings[None]}
        with attention.answering(PagedAnswer(self.config, batch, caches)):
            output = self.body(**inputs, position_ids=batch.positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return batch.with_logits(hidden)

    def forward_with_aux(
        self, batch: ForwardBatch, caches: list[tuple[Tensor, Tensor]], aux_hidden_states: AuxHiddenStates
    ) -> Any:
        """Never called: a feature that needs hidden states is refused while the model is loaded."""
        raise RuntimeError("this model's hidden states are not shown")

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states unchanged: they have gone through the final norm before."""
        return hidden

    @property
    def angle_table(self) -> None:
        """The model turns heads by itself."""

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, add_adapters: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """Scores of the vocabulary, float32 [rows, vocab]. out: as of `Decoder.logits`; there are no adapters."""
        if self.head is None:
            raise RuntimeError("this model does not generate text")
        self.head.hidden = hidden[None]
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        self.head.hidden = None
        return logits[0].float() if out is None else out.copy_(logits[0])

    def classify(self, hidden: Tensor) -> Tensor:
        """Never called: there is no classifier."""
        raise RuntimeError("this model has no classifier")

    @torch.inference_mode()
    def plain_logits(self, tokens: list[int]) -> Tensor:
        """The model's own result for a sequence: float32 [tokens, vocab], or hidden states without a head."""
        self.model.set_attn_implementation("eager")
        if self._place is not None:
            setattr(self.model, self._place, self.body)
        try:
            output = self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        finally:
            if self._place is not None:
                setattr(self.model, self._place, self.head)
            self.model.set_attn_implementation(attention.NAME)
            self.body.set_attn_implementation(attention.NAME)
        found: Tensor = output.logits if self.head is not None else output.last_hidden_state
        return found[0].float()


def read_model(
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    dummy: bool = False,
    seed: int = 0,
    form: QuantizationFormat | None = None,
    mode: OnLoad | None = None,
) -> Any:
    """The model with its weights, from safetensors or a GGUF file alone.

    Args:
        dummy: random weights instead, by `seed`.
        form: how its linear layers are stored; None is plainly.
        mode: how they are quantized on the way.

    Raises:
        ModelLoadError: a file is missing or damaged, or does not hold what the model needs, no more and no less.
    """
    settings = hf_config(folder, text_part=config.text_part)
    skeleton = make_skeleton(config.architecture, settings)
    found = type(skeleton)
    if dummy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = found._from_config(settings, attn_implementation=attention.NAME, dtype=dtype)
    elif is_gguf(folder):
        model = empty_model(found, settings, attn_implementation=attention.NAME, dtype=dtype)
        fill(model, folder, dtype, config.layers[0].head_dim, tied=config.tie_word_embeddings)
    elif form is not None:
        stored = QuantizedCheckpoint(folder, dtype, lambda _: None, form)
        parts = read_parts(stored, skeleton, config, mode)
        model = _from_tensors(folder, with_layers(found, parts.layers), config, settings, dtype, parts.tensors)
    else:
        tensors = _text_tensors(folder, config) if config.text_part else None
        model = _from_tensors(folder, found, config, settings, dtype, tensors)
    pack_layers(model, mode)
    return prepared(model)


def _from_tensors(
    folder: Path, kind: Any, config: DecoderConfig, settings: Any, dtype: torch.dtype, tensors: dict[str, Tensor] | None
) -> Any:
    """The model of the class `kind` with these tensors, or those of the folder where they are None.

    Raises:
        ModelLoadError: tensors are missing or left over, or have other shapes.
    """
    model, unexpected = load_pretrained(kind, folder, settings, dtype, attention=attention.NAME, tensors=tensors)
    left_out = set(next_token_tensors(unexpected, config.num_layers))
    refuse_tensors("unexpected", [name for name in unexpected if name not in left_out])
    return model


def _text_tensors(folder: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint's text part, by the names of a checkpoint of its own."""
    stored = Checkpoint(folder, torch.float32)
    names = stored_names(config, stored, EMBEDDING)
    decoder_weights(config, stored, EMBEDDING)  # removes the tensors of other parts
    asked = {name: names.asked(name) for name in stored.names()}
    found: dict[str, Tensor] = {}
    for file in folder_weight_files(folder):
        with safe_open(folder / file, framework="pt") as handle:
            found |= {asked[name]: handle.get_tensor(name) for name in handle.keys() if name in asked}  # noqa: SIM118
    return found


@torch.inference_mode()
def _fix_rotations(body: Any, max_model_len: int) -> None:
    """Rotations that follow the longest position take the one of the longest sequence served, and stay there.

    Else keys that are cached would not fit those that come later, and rows would depend on what is beside them.
    """
    last, like = torch.tensor([[max_model_len - 1]]), torch.zeros(1, 1, 1, dtype=torch.float32)
    for module in body.modules():
        kind = getattr(module, "rope_type", None)
        if kind in STRETCHED:
            module(like, last)
            module.rope_type = "default"
        elif isinstance(kind, dict):
            for layers in [layers for layers, its in kind.items() if its in STRETCHED]:
                module(like, last, layers)
                kind[layers] = "default"
