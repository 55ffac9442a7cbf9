"""Sampling parameters: vLLM's names, defaults and rules, checked in one place for every door.

`SamplingParams(...)` checks what can be checked alone; `check_against(limits)` what depends on the served model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.beam_search import BeamSearchParams, check_beam_fields
from troupellm.protocol.params.checks import check_id_list, check_integer, check_number, check_strings
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.params.logprobs import LogprobsMode
from troupellm.protocol.params.output_kind import RequestOutputKind
from troupellm.protocol.params.sampling_checks import (
    RepetitionDetection,
    StopScope,
    ThinkingMarks,
    check_processors,
    check_repetition,
    check_stop_scope,
    check_thinking,
)
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""
MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROB_IDS = 128
INT64_MAX = 2**63 - 1

_NUMBERS: dict[str, tuple[float, float, bool]] = {
    # field: lowest, highest, whether the lowest value itself is excluded
    "temperature": (0.0, 2.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 1000.0, True),
    "length_penalty": (-10.0, 10.0, False),
}
_INTEGERS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), INT64_MAX),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (-1, 2**31 - 1),
    "prompt_logprobs": (-1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "stream_interval": (1, 2**31 - 1),
}
_OPTIONAL = frozenset({"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "stream_interval"})
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "use_beam_search",
    "early_stopping",
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the served model and the server."""

    vocab_width: int
    """Width of the logits: ids are checked against this, not against the tokenizer's size."""
    max_model_len: int
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_tokens: int | None = None
    """The cap of every sequence, above its request's own limit; None is no cap."""
    stream_interval: int | None = None
    """Least tokens per delta of a stream; None is by time."""


class SamplingParams(msgspec.Struct, kw_only=True):
    """How to generate. See `protocol/messages/worker.py:SamplingState` for what the worker is told.

    A field may be assigned, as scripts for vLLM do, and is checked then as in the constructor. A request keeps the
    values that it was made with.

    Differs from vLLM in four ways: n > 1 with a greedy temperature is accepted (clients of the OpenAI API send it; all
    answers are equal), a logit_bias beyond [-100, 100] is refused instead of cut, numbers and sizes are bounded more
    closely (n by 64), and true is no number, so that `logprobs=True` is refused; write 1. Temperatures in (0, 0.01) act
    as 0.01, as there.

    Raises:
        InvalidRequest: a value has the wrong type or is out of range; names the field and the range.
    """

    n: int = 1
    best_of: int | None = None
    """Sequences to generate, of which the n with the greatest cumulative log-probability are the answer; None is n."""
    use_beam_search: bool = False
    """Search for the likeliest sequences instead of drawing them; `best_of` (or n) is how many beams there are."""
    length_penalty: float = 1.0
    """Beams are ranked by cumulative log-probability / length ** length_penalty; the length counts the prompt."""
    early_stopping: bool = False
    """End a beam search when as many sequences are complete as there are beams, though others could become better."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    """None draws a fresh seed per request."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None generates up to the context length."""
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    """Values outside [-100, 100] are refused."""
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    """Top alternatives per generated token; -1 is the whole vocabulary, as far as the server allows."""
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    """Report exactly these per generated token, in this order, instead of the top alternatives."""
    skip_special_tokens: bool = True
    kept_token_ids: Sequence[int] | None = None
    """Special tokens that are text although others are skipped: the marks of tool calls and reasoning."""
    spaces_between_special_tokens: bool = True
    """False leaves out the space that some tokenizers put between two special tokens in a row."""
    detokenize: bool = True
    priority: int = 0
    """Lower runs earlier under the priority policy."""
    thinking_token_budget: int | None = None
    """Tokens that the model may think; then the end mark is forced. None and -1 are no limit."""
    thinking: ThinkingMarks | None = None
    """How to tell that the model thinks; a budget needs it."""
    stop_scope: StopScope | None = None
    """Where stop strings count; None: everywhere."""
    repetition_detection: RepetitionDetection | None = None
    """Ends the sequence with the reason `repetition`."""
    logits_processors: Mapping[str, Mapping[str, Any]] | None = None
    """Plug-ins of the server to apply, by name, with arguments that are plain data."""
    extra_args: Mapping[str, Any] | None = None
    """Arguments that plug-ins claim by their own names: who claims one is applied. `vllm_xargs` over HTTP."""
    stream_interval: int | None = None
    """Tokens per delta of a stream; 1 is one delta per token. None: as the engine's flush interval has it."""
    guide: GuideSpec | None = None
    """The form of the output: JSON, a schema, a regular expression, one of several texts, a grammar."""
    structured_outputs: StructuredOutputsParams | None = None
    """The same with vLLM's names; becomes `guide`."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Which part of a running answer `LLMEngine` and `AsyncLLMEngine` give at a time; other callers do not read it."""

    def __setattr__(self, name: str, value: Any) -> None:
        changes = {name: value} if name != "structured_outputs" else {name: value, "guide": None}
        checked = msgspec.structs.replace(self, **changes)
        for field in {name, "guide"}:
            super().__setattr__(field, getattr(checked, field))

    def __post_init__(self) -> None:
        for field, (low, high, exclusive) in _NUMBERS.items():
            check_number(field, getattr(self, field), low, high, exclusive=exclusive)
        for field, (least, most) in _INTEGERS.items():
            value = getattr(self, field)
            if value is not None or field not in _OPTIONAL:
                check_integer(field, value, least, most)
        for field in _FLAGS:
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequest(f"{field} must be true or false", param=field, code="invalid_type")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                param="min_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n ({self.n}), got {self.best_of}", param="best_of")
        self._check_stops()
        self._check_logit_bias()
        check_id_list("kept_token_ids", self.kept_token_ids, allow_empty=True)
        check_id_list("stop_token_ids", self.stop_token_ids, allow_empty=True)
        check_id_list("allowed_token_ids", self.allowed_token_ids, allow_empty=False)
        check_id_list("logprob_token_ids", self.logprob_token_ids, allow_empty=False, most=MAX_LOGPROB_IDS)
        check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH)
        if self.thinking_token_budget is not None or self.thinking is not None:
            check_thinking(self.thinking_token_budget, self.thinking)
        if self.stop_scope is not None:
            check_stop_scope(self.stop_scope)
        if self.repetition_detection is not None:
            check_repetition(self.repetition_detection)
        if self.logits_processors is not None or self.extra_args is not None:
            check_processors(self.logits_processors, self.extra_args)
        if self.use_beam_search or self.length_penalty != 1.0 or self.early_stopping:
            check_beam_fields(self)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequest("output_kind must be a RequestOutputKind", param="output_kind", code="invalid_type")
        if self.structured_outputs is not None:
            self._take_structured_outputs(self.structured_outputs)
        if self.guide is not None:
            self._check_guide(self.guide)

    @property
    def num_sequences(self) -> int:
        """How many are generated."""
        return self.best_of or self.n

    @property
    def selects(self) -> str | None:
        """The field that makes the answer known only when all sequences have ended, so that it cannot be streamed."""
        if self.use_beam_search:
            return "use_beam_search"
        return "best_of" if self.num_sequences > self.n else None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_against(self, limits: Limits) -> None:
        """Check what depends on the model.

        Raises:
            InvalidRequest: an id is outside the logits, or more log-probabilities than allowed.
        """
        width = limits.vocab_width
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            ids = getattr(self, field)
            if ids and max(ids) >= width:  # none is negative
                raise InvalidRequest(f"{field} has token id {max(ids)}; ids must be in [0, {width - 1}]", param=field)
        if self.use_beam_search and 2 * self.num_sequences > width:
            raise InvalidRequest(f"n must be in [1, {width // 2}] with use_beam_search", param="n")
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, field)
            if wanted is None:
                continue
            most = min(limits.max_logprobs, width)
            if (width if wanted == -1 else wanted) > most:
                raise InvalidRequest(
                    f"{field} must be in [0, {most}], got {wanted}", param=field, code="integer_above_max_value"
                )

    def _check_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        check_strings("stop", stops, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        if stops and not self.detokenize:
            raise InvalidRequest("stop needs detokenize: true", param="stop")

    def _take_structured_outputs(self, wanted: Any) -> None:
        if not isinstance(wanted, StructuredOutputsParams):
            raise InvalidRequest(
                "structured_outputs must be StructuredOutputsParams", param="structured_outputs", code="invalid_type"
            )
        if self.guide is not None:
            raise InvalidRequest("structured_outputs and guide exclude each other", param="structured_outputs")
        msgspec.structs.force_setattr(self, "guide", wanted.spec())
        msgspec.structs.force_setattr(self, "structured_outputs", None)

    def _check_guide(self, guide: Any) -> None:
        if not isinstance(guide, GuideSpec):
            raise InvalidRequest("guide must be a GuideSpec", param="guide", code="invalid_type")
        if self.use_beam_search:
            raise InvalidRequest(
                f"{guide.field} does not go with use_beam_search", param=guide.field, code="unsupported_parameter"
            )

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} entries", param="logit_bias"
            )
        for token_id, value in self.logit_bias.items():
            check_integer("logit_bias", token_id, 0, 2**31 - 1)
            check_number("logit_bias", value, -100.0, 100.0, exclusive=False)


def beam_sampling(params: BeamSearchParams, limits: Limits) -> SamplingParams:
    """A search as a request.

    Raises:
        InvalidRequest: a value is out of range; names the field.
    """
    check_integer("beam_width", params.beam_width, 1, MAX_N)
    return SamplingParams(
        n=params.beam_width,
        use_beam_search=True,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=params.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=min(2 * params.beam_width, limits.max_logprobs, limits.vocab_width),
    )


def number_ranges() -> dict[str, tuple[float, float, bool]]:
    """Every numeric field: lowest, highest, and whether the lowest value itself is excluded."""
    return _NUMBERS | {name: (least, most, False) for name, (least, most) in _INTEGERS.items()}
