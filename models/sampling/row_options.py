"""The sampling options of one row, parsed once when the row joins."""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from troupellm.kernels.sampling import WIDEST_PREFIX
from troupellm.kernels.sampling.noise import stream_key
from troupellm.models.sampling.logits_processors import Processors, RowProcessors
from troupellm.models.sampling.thinking_budget import ThinkingWatch
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.sampling import GREEDY_EPSILON

_NUCLEUS_PREFIX = 128
"""Prefix for top_p alone: it rarely keeps more tokens than this at usual temperatures."""
_TOP_K_PREFIXES = (64, 256, WIDEST_PREFIX)


class RowOptions:
    """The options of one row; a pure function of its sampling state and prompt."""

    def __init__(
        self,
        state: SamplingState,
        prompt: Tensor,
        vocab: int,
        *,
        known: bool = True,
        processors: Processors | None = None,
    ) -> None:
        """
        Args:
            prompt: token ids, int32 or int64 [prompt]; kept.
            known: the ids are those of the prompt; False: they only hold the places of input embeddings.
            processors: the plug-ins that there are.
        """
        self.state = state
        self.prompt = prompt
        self.num_prompt_tokens = prompt.numel()
        self.greedy = state.temperature < GREEDY_EPSILON
        self.inverse_temperature = 0.0 if self.greedy else max(1.0 / state.temperature, 1e-30)
        self.stream = stream_key(state.seed, state.fork)
        self.top_k = state.top_k if 0 < state.top_k < vocab else vocab
        self.log_min_p = math.log(state.min_p) if state.min_p > 0 else -math.inf
        self.prefix = self._prefix(vocab)
        self.penalized = state.repetition_penalty != 1 or state.presence_penalty != 0 or state.frequency_penalty != 0
        self.allowed = valid_ids(state.allowed_token_ids, vocab)
        self.stops = valid_ids(state.stop_token_ids if state.min_tokens > 0 else (), vocab)
        self.min_length = self.num_prompt_tokens + state.min_tokens
        self.additions = _additions(state, vocab)
        self.words = tuple(word for word in state.bad_words if len(word) > 1 and 0 <= word[-1] < vocab)
        self.longest_prefix = max((len(word) - 1 for word in self.words), default=0)
        self.known = known
        self.thinking = None if state.thinking is None else ThinkingWatch(state.thinking, prompt)
        self.processors = RowProcessors(state, processors or {}) if state.processors else None
        asked = self.penalized, self.allowed.numel(), self.stops.numel(), self.additions, self.words, state.processors
        self.plain = state.logprobs < 0 and self.thinking is None and not any(asked)
        """True if the row asks only for a draw."""
        self._vocab = vocab

    @property
    def refusal(self) -> str | None:
        """Why nothing can be computed for this row; safe for clients."""
        return None if self.processors is None else self.processors.refusal

    def plug_in_options(self, name: str) -> Any:
        """The row's arguments for a plug-in, as the plug-in prepared them."""
        return None if self.processors is None else self.processors.options[name]

    def _prefix(self, vocab: int) -> int | None:
        """None if nothing is cut off, else the `prefix` of `draw_truncated`."""
        if self.top_k >= vocab:
            return None if self.state.top_p >= 1 else _NUCLEUS_PREFIX
        return next((width for width in _TOP_K_PREFIXES if self.top_k < width), 0)

    @cached_property
    def prompt_tokens(self) -> Tensor:
        """The prompt's distinct token ids, int64; empty unless they are known and penalised."""
        if self.state.repetition_penalty == 1 or not self.known:
            return self.prompt.new_empty(0, dtype=torch.int64)
        tokens: Tensor = torch.unique(self.prompt.long().clamp(0, self._vocab - 1))
        return tokens


def valid_ids(values: Iterable[int], vocab: int) -> Tensor:
    """int64; ids beyond the logits are left out, because as places they would lie in the next row."""
    return torch.tensor([value for value in values if 0 <= value < vocab], dtype=torch.int64)


def _additions(state: SamplingState, vocab: int) -> dict[int, float]:
    """The number to add per token id: the bias, and -inf for bad words of one token."""
    additions: dict[int, float] = {}
    for token_id, value in state.logit_bias:
        if 0 <= token_id < vocab:
            additions[token_id] = additions.get(token_id, 0.0) + value
    for word in state.bad_words:
        if len(word) == 1 and 0 <= word[0] < vocab:
            additions[word[0]] = -math.inf
    return additions
