"""Proposal batches of given texts, for proposers without a model."""

from collections.abc import Sequence

import numpy as np
import torch

from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.proposers.base import ProposalBatch, Proposer, RowDraws
from troupellm.protocol.messages.worker import NewRow, SamplingState

WIDTH = 600


def new_row(tokens: Sequence[int], *, prompt: int | None = None, tenant: str = "", epoch: int = 0) -> NewRow:
    return NewRow(
        row=0,
        epoch=epoch,
        request_id="r",
        token_ids=np.array(tokens, "<i4").tobytes(),
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        sampling=SamplingState(),
        blocks=((),),
        tenant=tenant,
    )


def batch_of(texts: dict[int, Sequence[int]], limits: Sequence[int]) -> ProposalBatch:
    """texts: by slot."""
    table = torch.full((max(texts) + 1, WIDTH), -7, dtype=torch.int32)
    for slot, text in texts.items():
        table[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    slots = np.array(list(texts), np.int64)
    return ProposalBatch(
        slots=slots,
        lengths=np.array([len(text) for text in texts.values()], np.int64),
        limits=np.array(limits, np.int64),
        tokens=table,
        blocks=np.zeros((1, max(texts) + 1, 1), np.int32),
        draws=RowDraws(torch.zeros(slots.size, dtype=torch.int64), torch.zeros(slots.size)),
    )


def drafted(drafts: Drafts) -> list[list[int]]:
    return [ids[:count].tolist() for ids, count in zip(drafts.token_ids, drafts.counts.tolist(), strict=True)]


def guess(proposer: Proposer, slot: int, text: Sequence[int], limit: int) -> list[int]:
    """Of one row."""
    return drafted(proposer.propose(batch_of({slot: text}, [limit])))[0]
