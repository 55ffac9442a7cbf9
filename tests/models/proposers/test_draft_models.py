"""Draft models: drafts are the draft model's own tokens, also behind drafts that were refused."""

import json
from pathlib import Path

import pytest
import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.memory.plan import block_bytes
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.speculation.draft_bench import DraftBench, Row, crowd, read_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("drafts")
    return write_tiny_model(home / "target"), write_tiny_model(home / "small", seed=1)


def test_a_model_that_drafts_for_itself_is_always_right(folders: tuple[Path, Path]) -> None:
    bench = DraftBench(folders[0], SpeculativeConfig(method="draft_model", model=str(folders[0])))
    kept = crowd(bench, lambda row, drafts: None, most=3)
    assert set(kept) == {3}
    assert len(kept) > 50


def test_drafts_are_what_the_draft_model_writes(folders: tuple[Path, Path]) -> None:
    bench = DraftBench(folders[0], SpeculativeConfig(method="draft_model", model=str(folders[1])))
    small = DraftBench(folders[1], SpeculativeConfig(method="draft_model", model=str(folders[1])))

    def check(row: Row, drafts: list[int]) -> None:
        tokens = list(row.tokens)
        for draft in drafts:
            with torch.inference_mode():
                scores = small.decoder.logits(small.aux(tokens, AuxHiddenStates(last=True))[-1:])
            assert draft == int(scores.argmax())
            tokens.append(draft)

    kept = crowd(bench, check, most=3)
    assert min(kept) == 0, "nothing was refused"


def test_a_draft_model_with_another_tokenizer_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[7:9]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelLoadError, match="another tokenizer than the target"):
        DraftBench(folders[0], SpeculativeConfig(method="draft_model", model=str(other)))
    (other / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="tokenizer of model other cannot be compared"):
        DraftBench(folders[0], SpeculativeConfig(method="draft_model", model=str(other)))


def test_a_draft_model_with_yarn_drafts_as_far_as_its_factor_stretches(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    small = write_tiny_model(tmp_path / "small")
    stretched = {
        **json.loads((small / "config.json").read_text()),
        "max_position_embeddings": 40,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }
    (small / "config.json").write_text(json.dumps(stretched))
    bench = DraftBench(folders[0], SpeculativeConfig(method="draft_model", model=str(small)))
    for slot, length in enumerate((20, 100, 140)):
        bench.add(slot, [length] * length, range(40 * slot, 40 * slot + 40))
    bench.step(0, 140)
    assert bench.propose(bench.rows, [3, 3, 3]).counts.tolist() == [3, 3, 0]


def test_layers_lie_in_the_blocks(folders: tuple[Path, Path]) -> None:
    bench = DraftBench(folders[0], SpeculativeConfig(model=str(folders[1])))
    assert bench.needs.layers is not None
    cache = KVCache(bench.decoder.config, 7, 4, torch.int8, drafter=bench.needs.layers)
    per_block = block_bytes(bench.decoder.config, 4, torch.int8) + block_bytes(bench.needs.layers, 4, torch.int8)
    assert sum(storage.nbytes for storage in cache.storages) == 7 * per_block
    cache.storages[1][:, :, 2] = 5
    cache.copy([(2, 6)])
    assert bool((cache.storages[1][:, :, 6] == 5).all())
    assert read_target(folders[0]).config == bench.decoder.config
