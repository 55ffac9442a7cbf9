"""A small checkpoint that several ranks share, each on a thread of its own; the leader's runner is driven by hand."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.decoder import EMBEDDING
from troupellm.models.load.read_decoder import Divided
from troupellm.models.parallel.decoder import DividedDecoder, LeadingCache
from troupellm.models.parallel.local_config import local_config
from troupellm.models.parallel.orders import END
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.runner.leading import FollowingRunner, LeadingRunner
from troupellm.models.runner.runner import ModelRunner
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair

SECONDS = 30.0


class RankPair(Pair):
    """As a `Pair` that was opened; `runner` is the leader's."""

    ranks: Ranks
    make_follower: Callable[[int, int], None]

    def runner(self, num_blocks: int = 120, block_size: int = 8, **more: Any) -> ModelRunner:
        """As `Pair.runner`. All runners share one cache per rank."""
        return LeadingRunner(self.ranks, self.decoder, self.cache, max_model_len=MAX_LEN, **more)


def divided(pair: Pair, ranks: Ranks, dtype: torch.dtype = torch.float32) -> tuple[DividedDecoder, Any]:
    """A rank's part of the decoder, and the sizes of its cache."""
    checkpoint = Checkpoint(pair.folder, dtype)
    source = decoder_weights(pair.config, checkpoint, EMBEDDING)
    config = local_config(pair.config, ranks.size)
    decoder = Divided(pair.config, ranks).decoder(config, source, max_model_len=MAX_LEN)
    checkpoint.finish()
    return decoder, (config, 120, 8, dtype)


@contextmanager
def ranked(pair: Pair, size: int, lead: Callable[..., Any], follow: Callable[..., Any]) -> Iterator[RankPair]:
    """The same checkpoint in so many ranks.

    Args:
        lead, follow: of a kind of `Ranks`.
    """
    leader, address = lead(size, SECONDS)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            ranks = follow(address, number, size, SECONDS)
            ranks.join()
            decoder, sizes = divided(pair, ranks)
            cache = KVCache(*sizes)
            cache.storage.fill_(float("nan"))
            FollowingRunner(decoder, cache, ranks, max_model_len=MAX_LEN).follow()
            ranks.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, size)]
    for thread in threads:
        thread.start()
    leader.join()
    shared = RankPair.__new__(RankPair)
    shared.__dict__.update(copy.copy(pair.__dict__))
    shared.ranks = leader
    shared.decoder, sizes = divided(pair, leader)
    shared.cache = LeadingCache(leader, *sizes)
    shared.cache.storage.fill_(float("nan"))
    try:
        yield shared
        leader.tell(END)
    finally:
        for thread in threads:
            thread.join(SECONDS)
        leader.close()
    assert not failures
