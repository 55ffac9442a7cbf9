"""The trainer of the built-in model: from nothing, and on from finished weights."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from troupellm.training import corpus, record
from troupellm.training.batches import Packer
from troupellm.training.evaluate import WEIGHTS, load
from troupellm.training.train import Trainer


def _options(folder: Path, source: Path | None) -> Namespace:
    return Namespace(
        seed=1,
        threads=1,
        source=source,
        minutes=None,
        rate=None,
        decay=None,
        first=0.65,
        compile=False,
        state=folder / "state.safetensors",
    )


def test_a_training_goes_on_from_finished_weights_and_their_record(tmp_path: Path) -> None:
    trainer = Trainer(_options(tmp_path, WEIGHTS))
    shipped, mine = load_file(WEIGHTS / "model.safetensors"), trainer.network.checkpoint()
    assert shipped.keys() == mine.keys()
    assert all(torch.equal(shipped[name], mine[name]) for name in shipped)
    before = [weight.detach().clone() for weight in trainer.network.parameters()]
    trainer.learn(Packer(trainer.tokenizer, "further").batch(1, 128, trainer.stage()))
    assert not all(torch.equal(old, new) for old, new in zip(before, trainer.network.parameters(), strict=True))
    trainer.progress.seconds = 90.0
    trainer.export(tmp_path / "weights")
    stages = record.read(tmp_path / "weights")
    assert stages[:-1] == record.read(WEIGHTS)
    assert stages[-1] == record.Stage(record.CONTINUED, 1.5, 1, 1e-3, 1, 128)
    network, tokenizer = load(tmp_path / "weights")
    assert tokenizer.get_vocab_size() == network.shape.vocab_size


def test_a_continued_training_is_short_and_low_and_reads_its_own_mixture(tmp_path: Path) -> None:
    trainer = Trainer(_options(tmp_path, WEIGHTS))
    assert (trainer.minutes, trainer.peak) == (12.0, 1e-3)
    assert trainer.stage() == corpus.CONTINUED
    assert trainer.rate() == pytest.approx(0.01)
    trainer.progress.step = 200
    assert trainer.rate() == 1.0
    for share, factor in ((0.2, 1.0), (0.6, 0.5), (1.0, 0.0)):
        trainer.progress.seconds = share * 12 * 60
        assert trainer.rate() == pytest.approx(factor)
    assert trainer.stage() == corpus.CONTINUED


def test_a_training_from_nothing_is_as_it_was(tmp_path: Path) -> None:
    trainer = Trainer(_options(tmp_path, None))
    assert (trainer.minutes, trainer.peak, trainer.decay) == (60.0, 3e-3, 0.4)
    stages: list[int] = []
    for share in (0.0, 0.64, 0.66):
        trainer.progress.seconds = share * 60 * 60
        stages.append(trainer.stage())
    assert stages == [0, 0, 1]
    trainer.export(tmp_path)
    assert [stage.text for stage in record.read(tmp_path)] == [record.FROM_NOTHING]


def test_a_continued_training_survives_its_state_file(tmp_path: Path) -> None:
    options = _options(tmp_path, WEIGHTS)
    trainer, other = Trainer(options), Trainer(options)
    trainer.learn(Packer(trainer.tokenizer, "further").batch(1, 128, trainer.stage()))
    trainer.progress.seconds = 30.0
    trainer.save()
    other.restore()
    assert other.progress == trainer.progress
    assert all(map(torch.equal, trainer.network.parameters(), other.network.parameters()))
