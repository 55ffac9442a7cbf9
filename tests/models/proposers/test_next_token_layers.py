"""DeepSeek-V3's own next-token layer drafts what the layer of `transformers`, in the published order, says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.deepseek_mtp import LAYERS, write_deepseek
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.speculation.draft_bench import DraftBench, Row, crowd


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """A checkpoint whose last layer is for further tokens, the model of `transformers` that has it, and the rest."""
    return write_deepseek(tmp_path_factory.mktemp("mtp") / "deepseek")


def test_a_model_drafts_with_its_own_layer(model: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    folder, reference, more = model
    bench = DraftBench(folder, SpeculativeConfig(method="mtp", num_speculative_tokens=3))
    body = reference.model

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        tokens, states = list(row.tokens), normed(bench.aux(row.tokens[:-1]), body.norm.weight)
        for draft in drafts:
            embedded = normed(body.embed_tokens(torch.tensor(tokens[1:])), more["enorm.weight"])
            x = torch.cat((embedded, normed(states, more["hnorm.weight"])), -1) @ more["eh_proj.weight"].T
            mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
            positions = torch.arange(len(x))[None]
            out = body.layers[LAYERS](
                x[None],
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=body.rotary_emb(x[None], positions),
            )
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
