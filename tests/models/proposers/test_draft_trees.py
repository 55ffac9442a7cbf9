"""Trees of drafts, and drafts that are drawn with the model's own noise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from troupellm.kernels.sampling.noise import log_exponential, position_keys, stream_key, token_codes
from troupellm.models.batch.row_drafts import ROOT, Drafts
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.proposers.draft_trees import Trees
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, write_tiny_model
from troupellm.tests.support.speculation import plain_heads
from troupellm.tests.support.speculation.draft_bench import DraftBench
from troupellm.tests.support.speculation.plain_heads import CONFIG, eagle_weights, medusa_weights

TEXT = [7, 80, 33, 120, 200, 9, 41]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("trees") / "target")


def proposals(
    target: Path, config: SpeculativeConfig, limits: list[int], temperature: float = 0.0
) -> tuple[DraftBench, list[list[int]], Drafts]:
    """Of rows that all have the same text, behind their first step."""
    bench = DraftBench(target, config)
    rows = [bench.add(slot, TEXT, range(20 * slot, 20 * slot + 20)) for slot in range(len(limits))]
    bench.step(0, 10)
    return bench, [list(row.tokens) for row in rows], bench.propose(rows, limits, temperature, seed=11)


def paths(drafts: Drafts, row: int) -> dict[int, list[int]]:
    """Of every node the tokens from the root to it; nodes follow their parents, and siblings differ."""
    assert drafts.parents is not None
    found: dict[int, list[int]] = {ROOT: []}
    for node in range(int(drafts.counts[row])):
        parent = int(drafts.parents[row, node])
        assert parent < node
        found[node] = [*found[parent], int(drafts.token_ids[row, node])]
    assert len({tuple(path) for path in found.values()}) == len(found)
    return found


def test_levels_hold_the_jointly_likeliest_and_a_cut_tree_keeps_its_parents() -> None:
    random = np.random.default_rng(0)
    trees, joint = Trees(2), [{(): 0.0}, {(): 0.0}]
    for width in (3, 5, 2):
        last = max(len(path) for path in joint[0])
        ends = [[path for path in every if len(path) == last] for every in joint]
        parents = len(ends[0])
        tokens = np.tile(np.arange(6) + 10 * last, (2, parents, 1))
        shares = -np.sort(random.random((2, parents, 6)), axis=2).astype(np.float32)
        trees.grow(tokens, shares, width)
        for row in range(2):
            ranked = sorted(ends[row], key=lambda path, row=row: -joint[row][path])
            grown = {
                (*path, int(tokens[row, place, each])): joint[row][path] + float(shares[row, place, each])
                for place, path in enumerate(ranked)
                for each in range(6)
            }
            joint[row] |= dict(sorted(grown.items(), key=lambda entry: -entry[1])[:width])
    drafts = trees.cut(np.array([10, 4]))
    assert drafts.counts.tolist() == [10, 4]
    assert {tuple(path) for path in paths(drafts, 0).values()} == set(joint[0])
    best = sorted(joint[1], key=lambda path: -joint[1][path])[:5]
    assert {tuple(path) for path in paths(drafts, 1).values()} == set(best)


def test_medusa_drafts_the_likeliest_nodes_of_each_level(target: Path, tmp_path: Path) -> None:
    weights = medusa_weights(3, 1, outputs=True)
    said: dict[str, object] = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    folder = plain_heads.write_head(tmp_path / "heads", weights, said)
    config = SpeculativeConfig(method="medusa", model=str(folder), tree_widths=(2, 4, 3))
    bench, texts, drafts = proposals(target, config, [9, 5])
    with torch.inference_mode():
        feature = bench.decoder.normed(bench.aux(texts[0][:-1])[-1:])
        shares = [
            (plain_heads.medusa(weights, head, 1, feature) @ weights[f"{head}.1.weight"].T)[0].log_softmax(-1)
            for head in range(3)
        ]
    level: dict[tuple[int, ...], float] = {(): 0.0}
    expected = dict(level)
    for width, share in zip((2, 4, 3), shares, strict=True):
        grown = {(*path, token): joint + float(share[token]) for path, joint in level.items() for token in range(270)}
        level = dict(sorted(grown.items(), key=lambda entry: -entry[1])[:width])
        expected |= level
    assert {tuple(path) for path in paths(drafts, 0).values()} == set(expected)
    best = sorted(expected, key=lambda path: -expected[path])[:6]
    assert {tuple(path) for path in paths(drafts, 1).values()} == set(best)


def test_eagle_goes_on_from_every_node(target: Path, tmp_path: Path) -> None:
    weights = eagle_weights()
    folder = plain_heads.write_head(tmp_path / "head", weights, CONFIG)
    config = SpeculativeConfig(method="eagle", model=str(folder), tree_widths=(3, 4, 5))
    bench, texts, drafts = proposals(target, config, [12, 10, 6, 2])
    text = texts[0]

    @torch.inference_mode()
    def shares(path: tuple[int, ...]) -> torch.Tensor:
        """Of what follows the text and a path behind it, by the head alone."""
        tokens, states = list(text), bench.decoder.normed(bench.aux(text[:-1]))
        for token in path:
            found = plain_heads.eagle(weights, bench.decoder.embedding.table, states, tokens[1:], 1)
            tokens, states = [*tokens, token], torch.cat((states, found[-1:]))
        found = plain_heads.eagle(weights, bench.decoder.embedding.table, states, tokens[1:], 1)
        return bench.decoder.scores(found[-1:])[0].log_softmax(-1)

    level: dict[tuple[int, ...], float] = {(): 0.0}
    expected = dict(level)
    for width in (3, 4, 5):
        grown = {}
        for path, joint in level.items():
            best = shares(path).topk(width)
            grown |= {(*path, int(token)): joint + float(share) for share, token in zip(*best, strict=True)}
        level = dict(sorted(grown.items(), key=lambda entry: -entry[1])[:width])
        expected |= level
    assert {tuple(path) for path in paths(drafts, 0).values()} == set(expected)
    best_nodes = sorted(expected, key=lambda path: -expected[path])
    assert {tuple(path) for path in paths(drafts, 1).values()} == set(best_nodes[:11])
    assert drafts.counts.tolist() == [12, 10, 6, 2]
    chain = paths(drafts, 2)
    assert [len(path) for path in chain.values()] == list(range(7)), "too few for the tree"
    assert list(paths(drafts, 3).values())[:3] == list(chain.values())[:3]


def test_drafts_are_drawn_as_the_model_draws(target: Path) -> None:
    config = SpeculativeConfig(method="draft_model", model=str(target), draft_sample_method="probabilistic")
    bench, texts, drafts = proposals(target, config, [4, 4, 2], temperature=1.3)
    codes = token_codes(LOGITS_WIDTH, torch.device("cpu"))
    assert drafts.counts.tolist() == [4, 4, 2]
    for slot, text in enumerate(texts):
        for draft in drafts.token_ids[slot, : int(drafts.counts[slot])].tolist():
            with torch.inference_mode():
                scores = bench.decoder.logits(bench.aux(text, AuxHiddenStates(last=True))[-1:])[0]
            key = position_keys(torch.tensor([stream_key(11, slot)]), torch.tensor([len(text)]))
            assert draft == int((scores / 1.3 - log_exponential(codes, key)[0]).argmax())
            text.append(draft)
    assert len({tuple(row) for row in drafts.token_ids[:, :2].tolist()}) == 3
    greedy = proposals(target, SpeculativeConfig(method="draft_model", model=str(target)), [3, 3], temperature=1.3)[2]
    assert greedy.token_ids[0].tolist() == greedy.token_ids[1].tolist()
