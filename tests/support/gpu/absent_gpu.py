"""A GPU that is not there: tensors on torch's device "meta" have shapes but no content, so each operation that needs a
number of theirs raises."""

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from troupellm.kernels.sampling.noise import token_codes
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import RandomWeights
from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, RopeConfig
from troupellm.models.gpu.batch import BatchMaker, GroupPlanner
from troupellm.models.gpu.cuda_graphs import DecodeGraphs
from troupellm.models.gpu.device import CpuDevice
from troupellm.models.gpu.graph_dispatch import Dispatcher
from troupellm.models.gpu.host_transfer import Staging
from troupellm.models.gpu.row_table import DeviceRows
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import Decoder
from troupellm.models.load.to_device import OnDevice

VOCAB, BLOCKS, BLOCK_SIZE, LENGTH, ROWS = 300, 9, 8, 64, 4
META = torch.device("meta")


class AbsentGpu(CpuDevice):
    """Nothing is copied to it."""

    torch_device = META


PLAIN = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=64,
    layers=(LayerShape(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(), intermediate_size=96),) * 2,
    rms_norm_eps=1e-5,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=False,
    checkpoint_dtype="bfloat16",
)
VARIED = msgspec.structs.replace(
    PLAIN,
    hybrid_cache=True,
    qk_norm="head",
    norm_offset=1.0,
    embedding_scale=8.0,
    attention_softcap=5.0,
    logit_softcap=4.0,
    activation="gelu_tanh",
).with_layers(window=(8, None), sinks=True)


@dataclass
class Absent:
    """A model there, and what decodes with it."""

    decoder: Decoder
    cache: KVCache
    rows: DeviceRows
    maker: BatchMaker
    graphs: DecodeGraphs


def absent(config: DecoderConfig, plan: GroupPlanner, aux_hidden_states: AuxHiddenStates | None = None) -> Absent:
    """aux_hidden_states: as of `DecodeGraphs`."""
    decoder = Decoder(config, OnDevice(RandomWeights(torch.bfloat16), META), max_model_len=LENGTH)
    cache, device = KVCache(config, BLOCKS, BLOCK_SIZE, torch.bfloat16, META), AbsentGpu()
    rows = DeviceRows(
        max_model_len=LENGTH,
        block_size=BLOCK_SIZE,
        num_groups=len(cache.layout.windows),
        device=device,
        staging=Staging(device, 3),
        slots=8,
        null_page=BLOCKS - 1,
    )
    maker, codes = BatchMaker(cache, plan), token_codes(VOCAB, META)
    graphs = DecodeGraphs(
        device, Dispatcher((ROWS,)), ROWS, decoder, cache, maker, rows, codes, aux_hidden_states=aux_hidden_states
    )
    return Absent(decoder, cache, rows, maker, graphs)


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=META)
