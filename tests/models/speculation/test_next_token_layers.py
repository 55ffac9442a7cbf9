"""DeepSeek-V3's own next-token layer drafts what the layer of `transformers`, in the published order, says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from draft_bench import DraftBench, Row, crowd
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.speculative import SpeculativeConfig

LAYERS, SIZE = 2, 64
SETTINGS: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": SIZE, "intermediate_size": 112, "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "kv_lora_rank": 32, "q_lora_rank": 40,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "num_mtp_layers": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """A checkpoint whose last layer is for further tokens, the model of `transformers` that has it, and the rest."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("mtp") / "deepseek"
    config = transformers.DeepseekV3Config(**SETTINGS)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    reference.save_pretrained(folder)
    weights, at = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
    more = {name: torch.rand(SIZE) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    more["eh_proj.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.3
    copies = {
        f"{at}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{at}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    weights |= copies | {f"{at}{name}": tensor for name, tensor in more.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(said))
    return folder, reference, more


def test_a_model_drafts_with_its_own_layer(model: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    folder, reference, more = model
    bench = DraftBench(folder, SpeculativeConfig(method="mtp", num_speculative_tokens=3))
    body = reference.model

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        tokens, states = list(row.tokens), normed(bench.tapped(row.tokens[:-1]), body.norm.weight)
        for draft in drafts:
            embedded = normed(body.embed_tokens(torch.tensor(tokens[1:])), more["enorm.weight"])
            x = torch.cat((embedded, normed(states, more["hnorm.weight"])), -1) @ more["eh_proj.weight"].T
            mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
            positions = torch.arange(len(x))[None]
            out = body.layers[LAYERS](
                x[None], attention_mask=mask, position_ids=positions,
                position_embeddings=body.rotary_emb(x[None], positions),
            )  # fmt: skip
            last = normed((out if isinstance(out, torch.Tensor) else out[0])[0, -1:], more["shared_head.norm.weight"])
            assert draft == int(reference.lm_head(last).argmax())
            tokens.append(draft)
            states = torch.cat((states, last))

    assert len(crowd(bench, check, most=3)) > 40


def test_a_model_without_such_layers_is_refused(
    model: tuple[Path, Any, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no layers for further tokens"):
        DraftBench(write_tiny_model(tmp_path / "llama"), SpeculativeConfig(method="mtp"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes((model[0] / "model.safetensors").read_bytes())
    said = json.loads((model[0] / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(said | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers is 0"):
        DraftBench(other, SpeculativeConfig(method="mtp"))
