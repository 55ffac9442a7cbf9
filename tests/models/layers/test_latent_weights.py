"""`kv_b_proj` of latent attention is taken apart and held whole: it keeps its bits, and memory is planned for it so."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.layers.mla import LatentAttention
from troupellm.models.memory.stored_size import stored_size
from troupellm.models.quantization.formats import read_format
from troupellm.tests.support.engines.inside import parts_of
from troupellm.tests.support.kernels.held_memory import held_by
from troupellm.tests.support.quantized.quantized_llama import load, write_model

KEPT = 2 * 8 * (64 + 64) * 256
"""Numbers in `kv_b_proj` of all layers: by far the most of the model."""
FORMAT = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}},
}  # fmt: skip


def tiny() -> transformers.DeepseekV3ForCausalLM:
    torch.manual_seed(3)
    config = transformers.DeepseekV3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        kv_lora_rank=256,
        q_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def latents(worker: object) -> list[LatentAttention]:
    return [layer.attention for layer in parts_of(worker).decoder.layers]


def taken(worker: object) -> int:
    """Bytes of all weights; of those, what latent attention holds is whole."""
    assert sum(layer.key_weight.nbytes + layer.value_weight.nbytes for layer in latents(worker)) == 4 * KEPT
    return held_by(parts_of(worker).decoder)


@pytest.mark.parametrize("mode", ["int8", "int8-weight-only", "int4", "fp8"])
def test_on_load_it_keeps_its_bits_and_is_counted_whole(tmp_path: Path, mode: str) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    worker, seen = load(tmp_path, quantization=mode)
    for index, attention in enumerate(latents(worker)):
        stored = model.model.layers[index].self_attn.kv_b_proj.weight.view(8, 128, 256)
        assert torch.equal(attention.key_weight, stored[:, :64])
        assert torch.equal(attention.value_weight, stored[:, 64:])
    planned = next(progress.total for progress in seen if progress.phase == "weights")
    assert taken(worker) <= planned
    worker.close()


def codes(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    values = torch.round(weight / scale).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values * scale


def test_of_a_quantized_checkpoint_it_is_counted_whole(tmp_path: Path) -> None:
    write_model(tmp_path, tiny(), codes, FORMAT)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["DeepseekV3ForCausalLM"]}))
    reader = ConfigReader.load(tmp_path)
    size = stored_size(tmp_path, describe_decoder(reader), read_format(reader), torch.float32, torch.device("cpu"))
    worker, _ = load(tmp_path)
    assert taken(worker) <= size.nbytes
    worker.close()
