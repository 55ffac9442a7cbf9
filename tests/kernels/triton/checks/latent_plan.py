"""The plan of a step for the kernels of latent vectors."""

import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.paged_attention.device_plan import DevicePlan
from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, MlaConfig, RopeConfig
from troupellm.models.gpu.batch import DeviceSpans, triton_planner
from troupellm.models.layers.cache_layout import cache_layout

DEVICE = check_device()
BLOCK_SIZE = 16


def config() -> DecoderConfig:
    latent = MlaConfig(latent=16, rotated=8, plain=8, value=8, query_latent=None)
    return DecoderConfig(
        architecture="DeepseekV2ForCausalLM",
        vocab_size=64,
        hidden_size=32,
        layers=(LayerShape(num_heads=4, num_kv_heads=1, head_dim=24, rope=RopeConfig(), intermediate_size=32),),
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        checkpoint_dtype="float32",
        mla=latent,
    )


def narrow(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def planned(spans: DeviceSpans) -> DevicePlan:
    """With blocks of row r from 2 * r on."""
    tables = torch.arange(8, dtype=torch.int32, device=DEVICE).view(4, 2)
    model = config()
    view = cache_layout(model).views[0]
    plan = triton_planner(model, BLOCK_SIZE, torch.float32, invariant=False)(tables, spans, view)
    assert isinstance(plan, DevicePlan)
    assert plan.shape.latent == 16
    assert plan.extend is None
    return plan


def test_every_token_is_a_row_for_latent_vectors() -> None:
    """Rows with one token first, then the others; the last one pads."""
    owners = torch.tensor([2, 2, 2, 0, 3, 3, 1], device=DEVICE)
    plan = planned(
        DeviceSpans(
            narrow(3, 6, 0, 4), narrow(4, 7, 3, 6), narrow(9, 0, 20, 2), num_tokens=7, decode_rows=2, owners=owners
        )
    )
    assert plan.decode is not None
    assert plan.decode.context_lens.tolist() == [18, 19, 20, 9, 1, 2, 0]
    assert plan.decode.query_starts.tolist() == list(range(7))
    assert plan.decode.block_tables[:, 0].tolist() == [4, 4, 4, 0, 6, 6, 2]


def test_rows_of_equally_many_tokens() -> None:
    starts, lens = narrow(0, 2, 4, 6), narrow(9, 2, 20, 0)
    plan = planned(DeviceSpans(starts, starts + 2, lens, num_tokens=8, decode_rows=4, queries=2))
    assert plan.decode is not None
    assert plan.decode.context_lens.tolist() == [8, 9, 1, 2, 19, 20, 0, 0]
    assert plan.decode.block_tables[:, 0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
