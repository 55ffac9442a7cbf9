"""EAGLE, EAGLE-3 and Medusa heads with random weights draft what their published forward passes say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, write_tiny_model
from troupellm.tests.support.speculation import plain_heads
from troupellm.tests.support.speculation.draft_bench import DraftBench, Row, behind_a_block, crowd
from troupellm.tests.support.speculation.plain_heads import (
    CONFIG,
    CONFIG3,
    DRAFT_VOCABULARY,
    SIZE,
    eagle3_weights,
    eagle_weights,
    medusa_weights,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("heads") / "target")


def drafts_of(
    step: Callable[[torch.Tensor, list[int]], torch.Tensor],
    first: torch.Tensor,
    score: Callable[[torch.Tensor], torch.Tensor],
    tokens: list[int],
    count: int,
) -> list[int]:
    """A chain by a head that is computed anew for every draft.

    Args:
        step: the head's outputs of its states at all positions and the tokens behind them.
        first: states of the model [positions, width], of all tokens but the last.
    """
    states, tokens, drafts = first, list(tokens), []
    for _ in range(count):
        found = step(states, tokens[1:])[-1:]
        drafts.append(int(score(found).argmax()))
        tokens.append(drafts[-1])
        states = torch.cat((states, found))
    return drafts


@pytest.mark.parametrize(("layers", "bias"), [pytest.param(1, False, marks=pytest.mark.slow), (2, True)])
def test_eagle_drafts_what_its_definition_gives(target: Path, tmp_path: Path, layers: int, bias: bool) -> None:
    weights = eagle_weights(layers, bias=bias)
    folder = plain_heads.write_head(tmp_path / "head", weights, CONFIG | {"num_hidden_layers": layers, "bias": bias})
    bench = DraftBench(target, SpeculativeConfig(model=str(folder)))
    decoder = bench.decoder

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        features = decoder.normed(bench.aux(row.tokens[:-1]))

        def step(states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
            return plain_heads.eagle(weights, decoder.embedding.table, states, tokens, layers)

        assert drafts == drafts_of(step, features, decoder.scores, row.tokens, 3)

    kept = crowd(bench, check, most=3)
    assert len(kept) > 40
    behind_a_block(bench, check)


def test_eagle3_drafts_what_its_definition_gives(target: Path, tmp_path: Path) -> None:
    weights = eagle3_weights()
    folder = plain_heads.write_head(tmp_path / "head", weights, CONFIG3)
    bench = DraftBench(target, SpeculativeConfig(model=str(folder)))
    ids = weights["d2t"] + torch.arange(DRAFT_VOCABULARY)

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        vectors = bench.aux(row.tokens[:-1]) @ weights["fc.weight"].T

        def step(states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
            return plain_heads.eagle3(weights, bench.decoder.embedding.table, states, tokens)

        def score(states: torch.Tensor) -> torch.Tensor:
            found = torch.full((states.shape[0], LOGITS_WIDTH), -torch.inf)
            found[:, ids] = plain_heads.normed(states, weights["norm.weight"]) @ weights["lm_head.weight"].T
            return found

        assert drafts == drafts_of(step, vectors, score, row.tokens, 3)

    assert len(crowd(bench, check, most=3)) > 40
    behind_a_block(bench, check)


@pytest.mark.parametrize("outputs", [True, False])
def test_medusa_drafts_what_its_definition_gives(target: Path, tmp_path: Path, outputs: bool) -> None:
    weights = medusa_weights(4, 2, outputs=outputs)
    config: dict[str, object] = {"medusa_num_heads": 4, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    file = "medusa_lm_head.safetensors" if outputs else "model.safetensors"
    folder = plain_heads.write_head(tmp_path / "heads", weights, config, file)
    bench = DraftBench(target, SpeculativeConfig(model=str(folder)))

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        feature = bench.decoder.normed(bench.aux(row.tokens[:-1])[-1:])
        for head, draft in enumerate(drafts):
            found = plain_heads.medusa(weights, head, 2, feature)
            scores = found @ weights[f"{head}.2.weight"].T if outputs else bench.decoder.scores(found)
            assert draft == int(scores.argmax())

    assert len(crowd(bench, check, most=4)) > 40


def test_medusa_heads_with_the_names_of_vllm_load(target: Path, tmp_path: Path) -> None:
    weights = medusa_weights(2, 1, outputs=True)
    renamed = {}
    for name, weight in weights.items():
        head, rest = name.split(".", 1)
        renamed[f"lm_heads.{head}.weight" if rest == "1.weight" else name.replace(".0.linear", ".layers.0", 1)] = weight
    renamed = {name if name.startswith("lm") else f"blocks.{name}": weight for name, weight in renamed.items()}
    config: dict[str, object] = {"num_heads": 2, "num_hidden_layers": 1, "hidden_size": SIZE}
    one = DraftBench(target, SpeculativeConfig(model=str(plain_heads.write_head(tmp_path / "vllm", renamed, config))))
    own = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    other = DraftBench(target, SpeculativeConfig(model=str(plain_heads.write_head(tmp_path / "own", weights, own))))
    seen: list[list[list[int]]] = [[], []]
    for bench, found in zip((one, other), seen, strict=True):
        crowd(bench, lambda row, drafts, found=found: found.append(drafts), most=2)  # type: ignore[misc]
    assert seen[0] == seen[1]
    assert len(seen[0]) > 5


def refused(target: Path, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, object], why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        DraftBench(target, SpeculativeConfig(model=str(plain_heads.write_head(folder, weights, config))))


def test_what_does_not_fit_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    one, three, many = eagle_weights(), eagle3_weights(), medusa_weights(2, 1, outputs=False)
    own: dict[str, object] = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    without = {name: weight for name, weight in one.items() if "o_proj" not in name}
    outside = three | {"d2t": three["d2t"] + 200}
    twice = three | {"d2t": three["d2t"] * 0 - torch.arange(DRAFT_VOCABULARY)}
    unknown = {name: weight for name, weight in three.items() if name not in ("d2t", "t2d")}
    cases = (
        (without, CONFIG, "layers.0.self_attn.o_proj.weight is missing"),
        (one | {"fc.more": one["fc.weight"].clone()}, CONFIG, "unknown tensor fc.more"),
        (one | {"fc.weight": one["fc.weight"][:, 1:].contiguous()}, CONFIG, r"fc.weight has shape \[32, 63\]"),
        (one, CONFIG | {"hidden_size": 48, "head_dim": 8}, "hidden_size must be the target's"),
        (one, CONFIG | {"vocab_size": 300}, "vocab_size must be the target's"),
        (one, CONFIG | {"add_para_norm": True}, "add_para_norm must be false"),
        (three, CONFIG3 | {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "must be 3 numbers of layers from 1 to 2"),
        (three, CONFIG | {"draft_vocab_size": 100}, "needs eagle_aux_hidden_state_layer_ids"),
        (three, CONFIG3 | {"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        (three, CONFIG3 | {"target_hidden_size": 64}, "target_hidden_size must be the target's"),
        (outside, CONFIG3, "d2t must name 100 different tokens"),
        (twice, CONFIG3, "d2t must name 100 different tokens"),
        (unknown, CONFIG3, "d2t is missing"),
        (many, own | {"medusa_num_heads": 3}, "2.0.linear.weight is missing"),
        (many, own | {"medusa_num_heads": 1}, "unknown tensor 1.0.linear"),
        (many, own | {"medusa_num_heads": 99}, "at most 16"),
        (many, own | {"hidden_size": 99}, "hidden_size must be the target's"),
        (many, own | {"truncated_vocab_size": 99}, "truncated_vocab_size must be"),
    )
    for number, (weights, config, why) in enumerate(cases):
        refused(target, tmp_path / str(number), weights, config, why)
    empty = tmp_path / "pickled"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(own))
    (empty / "medusa_lm_head.pt").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        DraftBench(target, SpeculativeConfig(method="medusa", model=str(empty)))
