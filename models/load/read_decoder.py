"""Reading a decoder's weights: plain safetensors, quantized ones, or a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import torch

from troupellm.kernels.quantized_linear.gguf import FINE, InputBits
from troupellm.models.checkpoint.safetensors import Checkpoint, RandomWeights, WeightSource
from troupellm.models.checkpoint.weight_names import StoredWeights, decoder_weights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.gguf.weights import GgufWeights
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.layers.decoder import EMBEDDING, Decoder, RunnableDecoder
from troupellm.models.load.notes import next_token_notes, rope_notes
from troupellm.models.load.to_device import OnDevice
from troupellm.models.memory.plan import MemoryBudget
from troupellm.models.parallel.decoder import DividedDecoder
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.parallel.sharded_weights import DividedSource, ShardedWeights
from troupellm.models.quantization.checkpoint import QuantizationFormat, QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.models.quantization.on_load import ANY_STORED, QuantizeOnLoad
from troupellm.models.quantization.unsaid import check_plain
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.setting_types import on_load_mode
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

CPU = torch.device("cpu")
INPUT_BITS: dict[str, InputBits] = {"int16": FINE, "int8": 8}


class Divided(NamedTuple):
    """A model that is divided among ranks."""

    whole: DecoderConfig
    ranks: Ranks

    def decoder(self, model: DecoderConfig, source: WeightSource, *, max_model_len: int) -> DividedDecoder:
        """This rank's part, from a source of whole plain weights. model: as of `local_config`."""
        parts = ShardedWeights(cast(DividedSource, source), self.whole, self.ranks)
        return DividedDecoder(model, parts, max_model_len=max_model_len, ranks=self.ranks)


def read_decoder(
    folder: Path,
    model: DecoderConfig,
    form: QuantizationFormat | None,
    config: ModelConfig,
    dtype: torch.dtype,
    budget: MemoryBudget,
    progress: ProgressSink,
    device: torch.device = CPU,
    *,
    drafts_itself: bool = False,
    divided: Divided | None = None,
) -> RunnableDecoder:
    """Make the decoder from stored weights, or from random numbers, on a device.

    Args:
        drafts_itself: the checkpoint's own layers for further tokens are read by a drafter.
        divided: `model` is this rank's part of a larger one.

    Raises:
        ModelLoadError: a file is missing or damaged, or its tensors are not those of the model.
    """
    dummy = config.load_format == "dummy"
    if model.implementation == "transformers":
        from troupellm.models.transformers_backend.decoder import TransformersDecoder, read_model

        if form is not None and not dummy:
            for note in form.notes():
                progress(LoadProgress(phase="weights", total=budget.weight_bytes, detail=note))
        mode = on_load_mode(config.quantization)
        network = read_model(folder, model, dtype, dummy=dummy, seed=config.seed, form=form, mode=mode)
        progress(LoadProgress(phase="weights", done=budget.weight_bytes, total=budget.weight_bytes))
        return TransformersDecoder(model, network, max_model_len=budget.max_model_len)
    if dummy:
        random = RandomWeights(dtype, seed=config.seed, device=device)
        if divided is not None:
            return divided.decoder(model, random, max_model_len=budget.max_model_len)
        return Decoder(model, quantizing(random, config), max_model_len=budget.max_model_len)
    done = 0

    def taken(size: int) -> None:
        nonlocal done
        done += size
        progress(LoadProgress(phase="weights", done=done, total=budget.weight_bytes))

    stored = open_weights(folder, model, form, dtype, taken, INPUT_BITS[config.gguf_inputs])
    left_out = [] if drafts_itself else next_token_notes(stored, model)
    for note in (*rope_notes(model, budget.max_model_len), *(() if form is None else form.notes()), *left_out):
        progress(LoadProgress(phase="weights", total=budget.weight_bytes, detail=note))
    source: WeightSource = decoder_weights(model, stored, EMBEDDING)
    if device.type != "cpu":
        source = OnDevice(source, device)
    if divided is not None:
        decoder: Decoder = divided.decoder(model, source, max_model_len=budget.max_model_len)
    else:
        decoder = Decoder(model, quantizing(source, config), max_model_len=budget.max_model_len)
    stored.finish()
    return decoder


def stored_format(folder: Path, reader: ConfigReader, config: ModelConfig) -> QuantizationFormat | None:
    """How a checkpoint's weights are quantized; None where they are not, or in blocks of a GGUF file.

    Raises:
        ModelLoadError: in a way that is not supported.
        ConfigError: settings that do not fit the stored weights.
    """
    form, file = read_format(reader), is_gguf(folder)
    if config.load_format == "safetensors" and file:
        raise ConfigError("load_format safetensors does not fit a GGUF file; use auto", param="load_format")
    if form is None and not file and config.load_format != "dummy":
        check_plain(Checkpoint(folder, torch.float32))
    if (form is not None or file) and config.quantization not in (None, *ANY_STORED):
        raise ConfigError("quantization must be int8: this checkpoint is quantized already", param="quantization")
    return form


def open_weights(
    folder: Path,
    model: DecoderConfig,
    form: QuantizationFormat | None,
    dtype: torch.dtype,
    taken: Callable[[int], None] = lambda _: None,
    input_bits: InputBits = FINE,
) -> StoredWeights:
    """
    Args:
        folder: in Hugging Face's format, or a GGUF file.
        form: how its weights are quantized, from config.json.
        dtype: type in which products are computed.
        taken: called with the bytes of each tensor.
        input_bits: of products with blocks of a GGUF file.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    if is_gguf(folder):
        return GgufWeights(folder, dtype, model.layers[0].head_dim, taken, input_bits)
    return Checkpoint(folder, dtype, taken) if form is None else QuantizedCheckpoint(folder, dtype, taken, form)


def quantizing(source: WeightSource, config: ModelConfig) -> WeightSource:
    """The source, which quantizes what it reads if the settings say so."""
    mode = on_load_mode(config.quantization)
    return source if mode is None else QuantizeOnLoad(source, mode)
