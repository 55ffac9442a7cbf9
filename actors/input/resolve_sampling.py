"""From the sampling parameters of a request to what the worker is told: texts become tokens, defaults become values."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.scheduler import BeamSettings
from troupellm.protocol.messages.worker import ProcessorInfo, SamplingState, ThinkingState, WorkerReady
from troupellm.protocol.params.sampling import Limits, SamplingParams
from troupellm.protocol.params.sampling_checks import ThinkingMarks

LEAST_TEMPERATURE = 0.01
"""Smaller ones that are not greedy are raised to this: logits divided by them lose their digits."""
_BEFORE_MARKS = ("", "\n", " ", ".", ".\n", "\n\n")
_BEHIND_MARKS = ("", "\n", "\n\n", " ", "a")
"""Texts around a mark, with which it may melt into other tokens than it has alone."""
_MOST_SPELLINGS = 64
"""Marks whose tokens are remembered."""


class SamplingStates:
    """Safe in any thread."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, ready: WorkerReady) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._processors: Mapping[str, ProcessorInfo] = {info.name: info for info in ready.logits_processors}
        self._always = tuple((info.name, info.default) for info in ready.logits_processors if info.default is not None)
        self._spellings: dict[str, tuple[tuple[int, ...], ...]] = {}

    def check(self, params: SamplingParams) -> None:
        """
        Raises:
            InvalidRequest: what is asked for is not among what this model and its server have; names the field.
        """
        if params.thinking is None and params.thinking_token_budget not in (None, -1):
            raise InvalidRequest(
                "thinking_token_budget: this model has no marks by which it could be told that it thinks",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        self._check_allowed(params)
        for name in params.logits_processors or ():
            if name not in self._processors:
                raise InvalidRequest(
                    f"logits_processors: {self._offered()}", param="logits_processors", code="unsupported_parameter"
                )
        claimed = {argument for info in self._processors.values() for argument in info.arguments}
        for argument in params.extra_args or ():
            if argument not in claimed:
                raise InvalidRequest(
                    f"extra_args: no plug-in of this server reads {argument}; {self._offered()}",
                    param="extra_args",
                    code="unsupported_parameter",
                )

    def of(self, params: SamplingParams, seed: int) -> SamplingState:
        """For the first of a request's sequences."""
        stops = self.eos(params) | frozenset(params.stop_token_ids or ()) if params.min_tokens else frozenset[int]()
        return SamplingState(
            temperature=0.0 if params.greedy else max(float(params.temperature), LEAST_TEMPERATURE),
            top_k=max(params.top_k, 0),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            seed=seed,
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logit_bias=tuple((token_id, float(bias)) for token_id, bias in (params.logit_bias or {}).items()),
            allowed_token_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
            bad_words=self._bad_words(params.bad_words or ()),
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(sorted(stops)),
            logprobs=self._generated_logprobs(params),
            prompt_logprobs=self._alternatives(params.prompt_logprobs),
            logprob_token_ids=tuple(params.logprob_token_ids or ()),
            # The model's raw log-probabilities select among answers; processors must not change the choice.
            logprobs_mode="raw_logprobs" if params.selects else self._limits.logprobs_mode,
            thinking=self._thinking(params),
            processors=self._processors_of(params),
        )

    def _check_allowed(self, params: SamplingParams) -> None:
        """Some token must be left to choose, where only some are allowed."""
        allowed = set(params.allowed_token_ids or ())
        if not allowed:
            return
        banned = {word[0] for word in self._bad_words(params.bad_words or ()) if len(word) == 1}
        if allowed <= banned:
            raise InvalidRequest("bad_words must leave some of allowed_token_ids", param="bad_words")
        if params.min_tokens and allowed <= banned | self.eos(params) | set(params.stop_token_ids or ()):
            raise InvalidRequest(
                "min_tokens must be 0 where all of allowed_token_ids that bad_words leaves end the answer",
                param="min_tokens",
            )

    def beam(self, params: SamplingParams) -> BeamSettings | None:
        if not params.use_beam_search:
            return None
        width = params.num_sequences
        return BeamSettings(
            length_penalty=float(params.length_penalty),
            early_stopping=params.early_stopping,
            num_candidates=max(2 * width, width + len(self.eos(params))),
            logprobs=max(self._alternatives(params.logprobs), 0),
        )

    def eos(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids

    def _generated_logprobs(self, params: SamplingParams) -> int:
        """How many alternatives the worker reports: what is shown, and what decides over the answer."""
        shown = self._alternatives(params.logprobs)
        beam = self.beam(params)
        if beam is not None:
            return max(shown, beam.num_candidates)
        return max(shown, 0) if params.selects or params.logprob_token_ids else shown

    def _alternatives(self, wanted: int | None) -> int:
        if wanted is None:
            return -1
        return self._limits.vocab_width if wanted == -1 else wanted

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens at the start of a text and behind a space, which are mostly different ones."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _thinking(self, params: SamplingParams) -> ThinkingState | None:
        budget, marks = params.thinking_token_budget, params.thinking
        if budget is None or budget < 0 or not isinstance(marks, ThinkingMarks):
            return None
        return ThinkingState(
            budget=budget,
            open=marks.open,
            starts=self._spelt(marks.start) if marks.start else (),
            ends=self._spelt(marks.end),
        )

    def _spelt(self, mark: str) -> tuple[tuple[int, ...], ...]:
        """Token sequences that say a mark, the plainest first; those behind which text may follow in the same token.

        Mostly a mark is one token of its own. Where it is not, its first and last letters melt into what stands beside.
        """
        known = self._spellings.get(mark)
        if known is None:
            found: dict[tuple[int, ...], None] = {}
            for behind in _BEHIND_MARKS:
                for before in _BEFORE_MARKS:
                    found[self._span(before, mark, behind)] = None
            known = tuple(found)
            if len(self._spellings) < _MOST_SPELLINGS:
                self._spellings[mark] = known
        return known

    def _span(self, before: str, mark: str, behind: str) -> tuple[int, ...]:
        """The fewest tokens of a text that hold the whole mark in it."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(before + mark + behind, add_special_tokens=False)
        first, last = len(before.encode()), len((before + mark).encode())
        position, span = 0, []
        for token_id in ids:
            end = position + len(tokenizer.token_bytes(token_id))
            if end > first and position < last:
                span.append(token_id)
            position = end
        return tuple(span) or tuple(ids)

    def _processors_of(self, params: SamplingParams) -> tuple[tuple[str, bytes], ...]:
        """Those of every request but a beam search, those that this one names, and those that claim its arguments."""
        if not params.logits_processors and not params.extra_args:
            return () if params.use_beam_search else self._always
        named, given = params.logits_processors or {}, params.extra_args or {}
        found: list[tuple[str, bytes]] = []
        for name, info in self._processors.items():
            claimed = {argument: given[argument] for argument in info.arguments if argument in given}
            if name in named or claimed or info.default is not None:
                default: dict[str, Any] = {} if info.default is None else msgspec.json.decode(info.default)
                arguments = {**default, **claimed, **named.get(name, {})}
                found.append((name, msgspec.json.encode(arguments)))
        return tuple(found)

    def _offered(self) -> str:
        names = ", ".join(self._processors)
        return f"this server has {names}" if names else "this server has no logits processors"
