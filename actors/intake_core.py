"""What the input processor decides about a request: its token ids, whether it can be served, whom to tell what."""

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from troupellm.actors.prefix_keys import PrefixHasher, namespace
from troupellm.models.chat_template import ChatTemplate, check_template_kwargs
from troupellm.models.tokenizer import Tokenizer
from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest
from troupellm.protocol.intake import ChatPrompt, PrepareRequest, Prompt, TextPrompt, TokensPrompt
from troupellm.protocol.output import OpenRequest
from troupellm.protocol.sampling import Limits, SamplingParams
from troupellm.protocol.scheduler import BeamSettings, SequenceSpec, SubmitRequest
from troupellm.protocol.worker import SamplingState, WorkerReady

SEED_MASK = 2**64 - 1
LEAST_TEMPERATURE = 0.01
"""Smaller ones that are not greedy are raised to this: logits divided by them lose their digits."""
_MOST_INT32 = 2**31 - 1


class Prepared(msgspec.Struct, frozen=True):
    """A request that can be served: what the output actor is told first, then the scheduler."""

    opened: OpenRequest
    submitted: SubmitRequest


def tokenize(prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate, most_tokens: int | None) -> list[int]:
    """Render and tokenize. Slow for long texts: 0.8 ms for 1,000 characters.

    Args:
        most_tokens: a text that cannot fit into so many is refused before it is tokenized; None takes any.

    Raises:
        InvalidRequest: no such template, messages that it refuses, text that is no Unicode, or much too long.
    """
    field = prompt_field(prompt)
    match prompt:
        case TokensPrompt(token_ids=token_ids):
            if most_tokens is not None and len(token_ids) > most_tokens:
                raise _too_long(field, most_tokens, len(token_ids), "has")
            return _checked_ids(token_ids)
        case TextPrompt(text=text, add_special_tokens=add_special_tokens):
            if not isinstance(text, str):
                raise InvalidRequest("prompt must be text", param=field, code="invalid_type")
        case ChatPrompt():
            text, add_special_tokens = _render(prompt, template), False
    if most_tokens is not None and len(text) > most_tokens * tokenizer.longest_token:
        raise _too_long(field, most_tokens, len(text) // tokenizer.longest_token, "has at least")
    check_unicode(field, text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _too_long(field: str, limit: int, got: int, has: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, the {field} {has} {got} tokens. Please reduce"
        f" the length of the {field}.",
        limit=limit,
        got=got,
        param=field,
    )


def prompt_field(prompt: Prompt) -> str:
    """The request field that errors about this prompt name."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def check_unicode(field: str, text: str) -> None:
    """Raises InvalidRequest for half of a surrogate pair, which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} has half of a surrogate pair at character {error.start}", param=field) from None


class Preparer:
    """Validation and resolution of requests against one loaded model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        limits: Limits,
        ready: WorkerReady,
        rows: Iterator[int],
        hasher: PrefixHasher | None = None,
    ) -> None:
        """
        Args:
            rows: numbers for sequences; outlives restarts of the actor, so that none is used twice.
            hasher: names blocks as the scheduler does; None without a prefix cache.
        """
        self._hasher = hasher
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._pool_tokens = ready.num_blocks * ready.block_size
        self._rows = rows

    def prepare(self, message: PrepareRequest, seed: int) -> Prepared:
        """Render, tokenize, validate and resolve. Safe in any thread, slow for what is long.

        Args:
            seed: for a request that brings none.

        Raises:
            InvalidRequest: the request cannot be served; names the field.
        """
        token_ids = tokenize(message.prompt, self._tokenizer, self._template, self._limits.max_model_len)
        params = message.params
        max_tokens = self.check(prompt_field(message.prompt), token_ids, params)
        prompt = array("i", token_ids).tobytes()
        sequences = self._sequences(params, seed)
        opened = OpenRequest(
            request=message.request,
            outbox=message.outbox,
            prompt_token_ids=prompt,
            rows=tuple(spec.row for spec in sequences),
            stop_strings=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            detokenize=params.detokenize,
            logprobs=0 if params.logprobs is None and params.selects else params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            min_tokens=params.min_tokens,
        )
        submitted = SubmitRequest(
            request=message.request,
            request_id=message.request_id,
            arrival=message.arrival,
            prompt=prompt,
            sequences=sequences,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            eos_token_ids=self._eos(params),
            priority=params.priority,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            prompt_keys=self._prompt_keys(message, prompt),
            streaming=message.streaming,
            beam=self._beam(params),
            deadline=message.deadline,
        )
        return Prepared(opened, submitted)

    def _prompt_keys(self, message: PrepareRequest, prompt: bytes) -> bytes:
        if self._hasher is None:
            return b""
        return self._hasher.prompt_keys(namespace(tenant=message.tenant, cache_salt=message.cache_salt), prompt)

    def check(self, field: str, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Whether the model can serve it; tells how many tokens may be generated.

        Args:
            field: what errors call the prompt.

        Raises:
            InvalidRequest: it cannot; names the field.
        """
        params.check_against(self._limits)
        if params.guide is not None:
            raise InvalidRequest("no guide actor here", param=params.guide.field, code="unsupported_parameter")
        self._check_prompt(field, token_ids)
        max_tokens = self._max_tokens(field, len(token_ids), params)
        for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
            for text in texts:
                check_unicode(name, text)
        return max_tokens

    def _check_prompt(self, field: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest(f"{field} must not be empty", param=field)
        width = self._limits.vocab_width
        if min(token_ids) < 0 or max(token_ids) >= width:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < width)
            raise InvalidRequest(f"{field} has token id {wrong}; ids must be in [0, {width - 1}]", param=field)

    def _max_tokens(self, field: str, prompt_tokens: int, params: SamplingParams) -> int:
        """How many tokens may be generated; by default as many as fit.

        The pool counts like the context: a sequence must be able to finish alone.
        """
        context, pool = self._limits.max_model_len, self._pool_tokens
        wanted = 1 if params.max_tokens is None else params.max_tokens
        total = prompt_tokens + wanted
        for limit, name in (
            (context, "This model's maximum context length is"),
            (pool, "This server's KV cache holds"),
        ):
            if total > limit:
                raise ContextLengthExceeded(
                    f"{name} {limit} tokens. However, you requested {total} tokens ({prompt_tokens} in the {field},"
                    f" {wanted} in the completion). Please reduce the length of the {field} or completion.",
                    limit=limit,
                    got=total,
                    param=field if prompt_tokens >= limit else "max_tokens",
                )
        if params.max_tokens is not None:
            return wanted
        left = min(context, pool) - prompt_tokens
        if params.min_tokens > left:
            raise InvalidRequest(
                f"min_tokens must be at most what the context leaves ({left}), got {params.min_tokens}",
                param="min_tokens",
            )
        return left

    def _eos(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids

    def _sequences(self, params: SamplingParams, seed: int) -> tuple[SequenceSpec, ...]:
        """All of a request's sequences share the seed; the fork number tells their draws apart."""
        given = None if params.seed == -1 else params.seed
        first = self._sampling_state(params, (seed if given is None else given) & SEED_MASK)
        others = (
            msgspec.structs.replace(first, fork=fork, prompt_logprobs=-1)  # the prompt is the same for all
            for fork in range(1, params.num_sequences)
        )
        return tuple(SequenceSpec(row=next(self._rows), sampling=state) for state in (first, *others))

    def _sampling_state(self, params: SamplingParams, seed: int) -> SamplingState:
        stops = self._eos(params) | frozenset(params.stop_token_ids or ()) if params.min_tokens else frozenset[int]()
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
        )

    def _beam(self, params: SamplingParams) -> BeamSettings | None:
        if not params.use_beam_search:
            return None
        width = params.num_sequences
        return BeamSettings(
            length_penalty=float(params.length_penalty),
            early_stopping=params.early_stopping,
            num_candidates=max(2 * width, width + len(self._eos(params))),
            logprobs=max(self._alternatives(params.logprobs), 0),
        )

    def _generated_logprobs(self, params: SamplingParams) -> int:
        """How many alternatives the worker reports: what is shown, and what decides over the answer."""
        shown = self._alternatives(params.logprobs)
        beam = self._beam(params)
        if beam is not None:
            return max(shown, beam.num_candidates)
        return max(shown, 0) if params.selects else shown

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


def _render(prompt: ChatPrompt, template: ChatTemplate) -> str:
    kwargs = dict(prompt.template_kwargs or {})
    check_template_kwargs(kwargs)  # before one of them can collide with an argument below
    return template.render(
        prompt.messages,
        prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        **kwargs,
    )


def _checked_ids(token_ids: Sequence[int]) -> list[int]:
    """Token ids as plain integers. Their range is checked against the model later."""
    try:
        return array("q", token_ids).tolist()
    except (TypeError, OverflowError):
        raise InvalidRequest(
            f"prompt must be text or a list of token ids in [0, {_MOST_INT32}]", param="prompt", code="invalid_type"
        ) from None
