"""A step on a GPU never waits for it, nor mixes devices: seen without one, on torch's device "meta".

Tensors there have shapes but no content, so whatever would need a number of theirs raises.
"""

import msgspec
import pytest
import torch
from torch import Tensor

from tests.support.tensor_attention import plan_tensors
from troupellm.kernels.sampling.noise import token_codes
from troupellm.models.checkpoint import RandomWeights
from troupellm.models.cuda.batch import BatchMaker, DeviceSpans
from troupellm.models.cuda.choosing import pairs
from troupellm.models.cuda.columns import CUT, DRAWN, GREEDY, WIDTH, choose
from troupellm.models.cuda.device import CpuDevice
from troupellm.models.cuda.dispatcher import Dispatcher, GraphKey
from troupellm.models.cuda.graphs import DecodeGraphs
from troupellm.models.cuda.penalties import FACTORS, penalize_rows
from troupellm.models.cuda.rows import DeviceRows
from troupellm.models.cuda.staging import Staging
from troupellm.models.cuda.weights import OnDevice
from troupellm.models.decoder import Decoder
from troupellm.models.decoder_config import DecoderConfig, RopeConfig
from troupellm.models.kv_cache import KVCache

VOCAB, BLOCKS, BLOCK_SIZE, LENGTH = 300, 9, 8, 64
META = torch.device("meta")


class AbsentGpu(CpuDevice):
    """Nothing is copied to it."""

    torch_device = META


PLAIN = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=LENGTH, rope=RopeConfig(),
    tie_word_embeddings=False, checkpoint_dtype="bfloat16", windows=(None, None),
)  # fmt: skip
VARIED = msgspec.structs.replace(
    PLAIN, windows=(8, None), hybrid_cache=True, qk_norm="head", norm_offset=1.0, embedding_scale=8.0,
    attention_sinks=True, attention_softcap=5.0, logit_softcap=4.0, activation="gelu_tanh",
)  # fmt: skip


@pytest.fixture(params=[PLAIN, VARIED], ids=["plain", "varied"])
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return request.param


def made(config: DecoderConfig) -> tuple[DecodeGraphs, BatchMaker, DeviceRows, Decoder, KVCache]:
    source = OnDevice(RandomWeights(torch.bfloat16), META)
    decoder = Decoder(config, source, max_model_len=LENGTH)
    cache = KVCache(config, BLOCKS, BLOCK_SIZE, torch.bfloat16, META)
    device = AbsentGpu()
    rows = DeviceRows(
        max_model_len=LENGTH, block_size=BLOCK_SIZE, num_groups=len(cache.layout.windows), device=device,
        staging=Staging(device, 3), slots=8, null_page=BLOCKS - 1,
    )  # fmt: skip
    maker = BatchMaker(cache, plan_tensors)
    codes = token_codes(VOCAB, META)
    return DecodeGraphs(device, Dispatcher((4,)), 4, decoder, cache, maker, rows, codes), maker, rows, decoder, cache


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_decode_step(config: DecoderConfig, queries: int, draws: bool) -> None:
    graphs, *_ = made(config)
    columns = torch.zeros(WIDTH, 4, dtype=torch.int64, device=META)
    logits, tokens = graphs.decode(GraphKey(4, queries, draws), columns)
    assert (logits.device.type, tokens.device.type) == ("meta", "meta")
    assert (logits.shape, tokens.shape) == ((4 * queries, VOCAB), (4 * queries,))


def test_a_mixed_step(config: DecoderConfig) -> None:
    _, maker, rows, decoder, cache = made(config)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=META)

    spans = DeviceSpans(
        numbers(3), *(numbers(3, dtype=torch.int32) for _ in range(3)), numbers(20), numbers(20), decode_rows=1
    )  # fmt: skip
    batch = maker.make(spans, rows.tokens, rows.block_tables, numbers(2))
    logits = decoder.logits(decoder.forward(batch, cache.layers))
    assert (logits.shape, logits.device.type) == ((2, VOCAB), "meta")
    tokens = choose(logits, numbers(WIDTH, 2), token_codes(VOCAB, META), CUT)
    assert (tokens.shape, tokens.device.type) == ((2,), "meta")


def test_rows_that_look_back() -> None:
    logits, texts = torch.zeros(3, VOCAB, device=META), torch.zeros(8, LENGTH, dtype=torch.int32, device=META)
    sound = penalize_rows(logits, torch.zeros(FACTORS + 2, 2, dtype=torch.int64, device=META), texts, LENGTH)
    assert (sound.shape, sound.device.type) == ((3,), "meta")
    told = pairs(logits, torch.zeros(3, dtype=torch.int64, device=META))
    assert (told.shape, told.dtype, told.device.type) == ((3,), torch.int64, "meta")


@pytest.mark.parametrize("kind", [GREEDY, DRAWN, CUT])
def test_what_would_wait_is_seen(kind: int) -> None:
    logits, columns = torch.zeros(2, VOCAB, device=META), torch.zeros(WIDTH, 2, dtype=torch.int64, device=META)
    tokens = choose(logits, columns, token_codes(VOCAB, META), kind)
    with pytest.raises(RuntimeError, match="meta tensor"):
        tokens.sum().item()
    with pytest.raises(NotImplementedError):
        tokens[tokens > 0].clone()
