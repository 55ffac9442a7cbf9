"""The engine's proposers draft with the shipped checkpoints what the networks in training form say."""

from dataclasses import dataclass

import pytest

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.proposers.checkpoint_folder import SHIPPED_METHODS
from troupellm.protocol.config.speculation import Method, SpeculativeConfig
from troupellm.tests.support.speculation.draft_bench import LONGEST, DraftBench
from troupellm.training import evaluate
from troupellm.training.drafters_evaluate import answers, load_drafters, measure, prompts
from troupellm.training.drafters_tally import Tally
from troupellm.training.drafters_texts import Generator, Text
from troupellm.training.network import Network

DEPTH = 4


@dataclass(frozen=True)
class Answers:
    target: Network
    texts: list[Text]


@pytest.fixture(scope="module")
def said() -> Answers:
    """Some short answers, whose texts fit the bench."""
    target, tokenizer = evaluate.load(BUILTIN_FOLDER)
    asked = [text for kind, group in prompts(2).items() if kind != "stories" for text in group]
    texts = answers(Generator(target, tokenizer), tokenizer, [one for one in asked if len(one) < 300])
    fitting = [text for text in texts if len(text.ids) + DEPTH < LONGEST and len(text.ids) > text.start + 2]
    assert len(fitting) >= 6
    return Answers(target, fitting[:: len(fitting) // 6][:6])


@pytest.mark.parametrize("method", SHIPPED_METHODS)
def test_the_engine_accepts_as_many_drafts(said: Answers, method: Method) -> None:
    bench = DraftBench(BUILTIN_FOLDER, SpeculativeConfig(method=method, model="builtin"))
    total = Tally()
    for text in said.texts:
        row = bench.add(0, text.ids[: text.start], range(40))
        while len(row.tokens) < len(text.ids):
            length = len(row.tokens)
            for kept in bench.step(DEPTH, LONGEST):
                # Tokens accepted behind the answer's end do not count.
                total.verified += 1
                total.accepted += min(kept, len(text.ids) - length)
        assert row.tokens[: len(text.ids)] == text.ids
        bench.drop(row)
    plain = measure(said.target, load_drafters(said.target)[method], said.texts, DEPTH, 0)
    assert total.verified == plain.verified
    assert total.accepted == plain.accepted
