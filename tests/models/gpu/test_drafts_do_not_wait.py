"""Drafting on a GPU waits for it once for all drafts of all rows: seen without one, on torch's device "meta".

Tensors there have shapes but no content, so each operation that would need a number of theirs raises.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import RandomWeights
from troupellm.models.gpu.host_transfer import Staging
from troupellm.models.gpu.row_table import DeviceRows
from troupellm.models.layers.decoder import Decoder
from troupellm.models.load.to_device import OnDevice
from troupellm.models.proposers import paged_proposer
from troupellm.models.proposers.base import Observation, ProposalBatch, RowDraws
from troupellm.models.proposers.choose_drafts import Guesser
from troupellm.models.proposers.draft_model import DraftModel
from troupellm.models.proposers.eagle import Eagle
from troupellm.models.proposers.paged_attention import Paging
from troupellm.models.proposers.paged_base import Network
from troupellm.models.proposers.paged_proposer import PagedProposer
from troupellm.protocol.messages.worker import NewRow, SamplingState
from troupellm.tests.support.gpu.absent_gpu import BLOCK_SIZE, BLOCKS, LENGTH, META, PLAIN, VOCAB, AbsentGpu

ONE = msgspec.structs.replace(PLAIN, layers=PLAIN.layers[:1])
ROWS = 3


def eagle(target: Decoder, source: OnDevice) -> Network:
    return Eagle(ONE, target, source, bias=False, longest=LENGTH)


def draft_model(target: Decoder, source: OnDevice) -> Network:
    return DraftModel(Decoder(ONE, source, max_model_len=LENGTH))


@pytest.mark.parametrize("make", [eagle, draft_model])
@pytest.mark.parametrize("greedy", [True, False])
def test_one_wait_for_all_drafts(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Decoder, OnDevice], Network], greedy: bool
) -> None:
    source = OnDevice(RandomWeights(torch.bfloat16), META)
    target = Decoder(PLAIN, source, max_model_len=LENGTH)
    cache = KVCache(PLAIN, BLOCKS, BLOCK_SIZE, torch.bfloat16, META, drafter=ONE)
    proposer = PagedProposer(
        make(target, source),
        Paging(ONE, cache, torch.bfloat16, batch_invariant=False),
        cache.draft_layers,
        Guesser(VOCAB, None, coupled=True, device=META),
        longest=LENGTH,
        dtype=torch.bfloat16,
    )
    waits: list[tuple[int, ...]] = []

    def waited(values: Tensor) -> np.ndarray[Any, Any]:
        waits.append(tuple(values.shape))
        return np.zeros(values.shape, dtype=np.int64)

    monkeypatch.setattr(paged_proposer, "to_host", waited)
    slots, tokens = np.arange(ROWS), torch.zeros(8, LENGTH + 1, dtype=torch.int32, device=META)
    blocks = np.arange(ROWS * 2, dtype=np.int32).reshape(1, ROWS, 2)
    for slot in range(ROWS):
        proposer.add_row(
            slot,
            NewRow(
                row=slot,
                epoch=0,
                request_id="",
                token_ids=bytes(20),
                num_prompt_tokens=5,
                sampling=SamplingState(),
                blocks=(),
            ),
        )
    starts, counts = np.zeros(ROWS, dtype=np.int64), np.full(ROWS, 5)
    hidden = torch.zeros(5 * ROWS, PLAIN.hidden_size, dtype=torch.bfloat16, device=META)
    proposer.observe(Observation(slots, starts, counts, hidden, tokens, blocks))
    assert not waits
    draws = RowDraws(torch.zeros(ROWS, dtype=torch.int64, device=META), torch.ones(ROWS, device=META), greedy)
    drafts = proposer.propose(ProposalBatch(slots, starts + 6, np.array([4, 2, 4]), tokens, blocks, draws))
    assert drafts.counts.tolist() == [4, 2, 4]
    assert waits == [(4, ROWS)]


def test_tokens_that_the_host_knows_are_there_before_anybody_drafts() -> None:
    device = AbsentGpu()
    device.torch_device = torch.device("cpu")
    rows = DeviceRows(
        max_model_len=LENGTH,
        block_size=BLOCK_SIZE,
        num_groups=1,
        device=device,
        staging=Staging(device, 3),
        slots=2,
        null_page=BLOCKS - 1,
    )
    rows.add(
        NewRow(
            row=7,
            epoch=0,
            request_id="",
            token_ids=np.array([3, 4], "<i4").tobytes(),
            num_prompt_tokens=2,
            sampling=SamplingState(),
            blocks=((0,),),
        )
    )
    rows.append_known(7, [5, 6])
    rows.settle()
    assert rows.tokens[rows.slot(7), :4].tolist() == [3, 4, 5, 6]
