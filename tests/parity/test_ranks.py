"""Several ranks that share a model give the tokens of `transformers`, however a plan is cut."""

import pytest
import torch

from troupellm.kernels import meeting
from troupellm.models.parallel.gloo import GlooRanks
from troupellm.models.parallel.shared_memory import SharedMemoryRanks
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.ragged_batch import check_ragged_batch
from troupellm.tests.support.checkpoints.rank_pairs import ranked
from troupellm.tests.support.checkpoints.watched_logits import watched_logits

KINDS = {
    "gloo": (GlooRanks.lead, GlooRanks.follow),
    "shared_memory": (SharedMemoryRanks.lead, SharedMemoryRanks.follow),
}
needs_memory = pytest.mark.skipif(
    not meeting.available(), reason="ranks meet in shared memory with compiled code alone"
)


@pytest.mark.parametrize("kind", ["gloo", pytest.param("shared_memory", marks=needs_memory)])
@pytest.mark.parametrize("name", ["llama"])
def test_two_ranks_give_the_tokens_of_transformers(
    name: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = Pair(tmp_path_factory.mktemp(name), FAMILIES[name]())
    with ranked(pair, 2, *KINDS[kind]) as shared:
        check_ragged_batch(shared)
        prompt = make_prompt(40)
        driver = Driver(shared.runner())
        driver.submit(0, prompt)
        with watched_logits(driver.runner) as seen:
            driver.run({0: 23})
            driver.generate(0, 6)
    expected = pair.logits(driver.tokens[0])[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=TOLERANCE, rtol=TOLERANCE)
