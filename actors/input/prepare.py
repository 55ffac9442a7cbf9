"""Decisions of the input processor about a request: its token ids, whether it can be served, and the messages that
follow.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec

from troupellm.actors.input.continued import continued
from troupellm.actors.input.embeddings import check_embeddings
from troupellm.actors.input.formatted_pair import formatted_pair
from troupellm.actors.input.media_prompt import MediaPrompts, items_of, media_tokens
from troupellm.actors.input.resolve_sampling import SamplingStates
from troupellm.actors.input.tokenize import CUT_MARGIN, check_unicode, kept_tokens, prompt_field, tokenize, too_long
from troupellm.actors.kv_cache.block_hash import PrefixHasher, namespace
from troupellm.models.chat_parsers.prompt_start import rendered_ending, start_of
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.kv_hints import KVHints, PrefixLease
from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest, context_sentence
from troupellm.protocol.messages.cache_groups import NO_LIMIT, capacity_tokens
from troupellm.protocol.messages.input import (
    ChatPrompt,
    EmbedsPrompt,
    PairPrompt,
    PrepareRequest,
    Prompt,
    Submission,
    TokensPrompt,
)
from troupellm.protocol.messages.media import MediaSpan, block_marks
from troupellm.protocol.messages.output import OpenRequest
from troupellm.protocol.messages.scheduler import SequenceSpec, SubmitRequest
from troupellm.protocol.messages.worker import SamplingState, WorkerReady
from troupellm.protocol.params.pooling import PoolingAbility, PoolingParams, PoolingState
from troupellm.protocol.params.sampling import Limits, SamplingParams

SEED_MASK = 2**64 - 1


class Prepared(msgspec.Struct, frozen=True):
    """A request that can be served: what the output actor is told first, then the scheduler."""

    opened: OpenRequest
    submitted: SubmitRequest


def check_generates(ready: WorkerReady) -> None:
    """Raises InvalidRequest for a model that writes no text."""
    if not ready.generates:
        tasks = ", ".join(ready.pooling.tasks if ready.pooling else ())
        raise InvalidRequest(
            f"the model does not generate text; it supports {tasks}", param="model", code="unsupported_task"
        )


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
        media: MediaPrompts | None = None,
    ) -> None:
        """
        Args:
            rows: numbers for sequences; outlives restarts of the actor, so that none is used twice.
            hasher: names blocks as the scheduler does; None without a prefix cache.
            media: None where the engine takes no images.
        """
        self._hasher, self._media = hasher, media
        self._tokenizer, self._template = tokenizer, template
        self._limits = limits
        self._pool_tokens = capacity_tokens(ready, ready.step_tokens or NO_LIMIT)
        self._rows = rows
        self._states = SamplingStates(tokenizer, limits, ready)
        self._hidden_size = ready.hidden_size
        self._ready = ready

    def prepare(self, message: PrepareRequest, seed: int) -> Prepared:
        """Render, tokenize, validate and resolve. Safe in any thread, slow for what is long.

        Args:
            seed: for a request that brings none.

        Raises:
            InvalidRequest: the request cannot be served; names the field.
        """
        if message.submission.pooling is not None:
            return self._pooling(message, message.submission.pooling)
        return self._generation(message, seed)

    def _generation(self, message: PrepareRequest, seed: int) -> Prepared:
        asked, params = message.submission, message.submission.params
        tokens, max_tokens = self.checked(asked.prompt, params)
        embeddings = asked.prompt.embeddings if isinstance(asked.prompt, EmbedsPrompt) else None
        prompt = array("i", tokens.token_ids).tobytes()
        sequences = continued(
            self._sequences(params, seed), asked.generated, params, max_tokens, self._limits.vocab_width
        )
        continues = bool(asked.generated)
        opened = OpenRequest(
            request=message.request,
            outbox=message.outbox,
            prompt_token_ids=prompt,
            rows=tuple(spec.row for spec in sequences),
            indices=tuple(spec.sampling.fork for spec in sequences) if continues else (),
            generated=tuple(spec.generated for spec in sequences) if continues else (),
            num_ended_tokens=sum(len(known.token_ids) // 4 for known in asked.generated if known.ended),
            stop_strings=params.stop_strings,
            stop_regions=params.stop_scope.regions if params.stop_scope and params.stop else (),
            stop_inside=self._stop_inside(asked, tokens.token_ids),
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            detokenize=params.detokenize,
            logprobs=_shown_logprobs(params),
            prompt_logprobs=None if continues else params.prompt_logprobs,
            min_tokens=params.min_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stream_interval=self.stream_interval(params),
            truncated=tokens.truncated,
            kept_token_ids=tuple(params.kept_token_ids or ()),
        )
        submitted = SubmitRequest(
            request=message.request,
            request_id=asked.request_id,
            arrival=message.arrival,
            prompt=prompt,
            sequences=sequences,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            eos_token_ids=self._states.eos(params),
            priority=params.priority,
            tenant=asked.tenant,
            cache_salt=asked.cache_salt,
            session=asked.hints.session,
            leases=_leases(tokens, asked.hints),
            borders=tokens.borders,
            prompt_keys=self._prompt_keys(message, prompt, tokens.media),
            adapter=message.adapter,
            streaming=asked.streaming,
            beam=self._states.beam(params),
            deadline=message.deadline,
            repetition=params.repetition_detection,
            embeddings=embeddings,
            media=tokens.media,
            items=items_of(asked.prompt),
        )
        return Prepared(opened, submitted)

    def _stop_inside(self, asked: Submission, token_ids: Sequence[int]) -> tuple[str, ...] | None:
        """The marks that end the reasoning in which an answer with stop strings begins; None where it begins
        outside."""
        scope = asked.params.stop_scope
        if scope is None or not scope.opens or not asked.params.stop:
            return None
        if scope.open is not None:
            return scope.closes if scope.open else None
        messages = asked.prompt.messages if isinstance(asked.prompt, ChatPrompt) else ()
        ending = rendered_ending(self._tokenizer, token_ids, messages, [*scope.opens, *scope.closes])
        start = start_of(ending, scope.opens, scope.closes)
        return scope.closes if start == "thinking" or (scope.always and start == "free") else None

    def _prompt_keys(self, message: PrepareRequest, prompt: bytes, spans: tuple[MediaSpan, ...] = ()) -> bytes:
        if self._hasher is None:
            return b""
        asked, adapter = message.submission, "" if message.adapter is None else message.adapter.digest
        # Placeholder tokens say nothing of what stands for them.
        media = (sha256(asked.prompt.embeddings).digest(),) if isinstance(asked.prompt, EmbedsPrompt) else ()
        owner = namespace(tenant=asked.tenant, cache_salt=asked.cache_salt, adapter=adapter, media=media)
        return self._hasher.prompt_keys(owner, prompt, block_marks(spans, self._ready.block_size))

    def checked(self, prompt: Prompt, params: SamplingParams) -> tuple[TokensPrompt, int]:
        """A prompt's tokens, and how many tokens may be generated.

        Raises:
            InvalidRequest: the model cannot serve it; names the field.
        """
        check_generates(self._ready)
        room = self._capped(params.max_tokens) or 1
        longest, bordered = self._limits.max_model_len, self._ready.state_slots > 0
        if isinstance(prompt, ChatPrompt) and (prompt.media or prompt.items):
            tokens = media_tokens(self._media, prompt, self._template, longest)
        else:
            tokens = tokenize(prompt, self._tokenizer, self._template, longest, room, with_borders=bordered)
        if isinstance(prompt, EmbedsPrompt):
            check_embeddings(prompt, self._hidden_size, params)
        return tokens, self._check(prompt_field(prompt), tokens.token_ids, params)

    def _check(self, field: str, token_ids: Sequence[int], params: SamplingParams) -> int:
        params.check_against(self._limits)
        if params.use_beam_search and self._ready.state_slots:
            text = "use_beam_search is not there yet for models with states beside the KV cache"
            raise InvalidRequest(text, param="use_beam_search", code="unsupported_parameter")
        self._states.check(params)
        self._check_prompt(field, token_ids)
        max_tokens = self._max_tokens(field, len(token_ids), params)
        for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
            for text in texts:
                check_unicode(name, text)
        return max_tokens

    def _capped(self, max_tokens: int | None) -> int | None:
        """With the server's own cap, which cuts and does not refuse."""
        most = self._limits.max_tokens
        if most is None or max_tokens is None:
            return max_tokens
        return min(max_tokens, most)

    def stream_interval(self, params: SamplingParams) -> int | None:
        """Tokens between two wakes of the reader: the server's, which a request can only raise; None is by time."""
        least, wanted = self._limits.stream_interval, params.stream_interval
        return max(least or 1, wanted or 1) if least or wanted else None

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
        given = self._capped(params.max_tokens)
        wanted = 1 if given is None else given
        total = prompt_tokens + wanted
        limit = min(context, pool)
        if total > limit:
            reason = "the KV cache holds no more" if pool < context else ""
            too_long = prompt_tokens >= limit
            raise ContextLengthExceeded(
                f"{context_sentence(limit, reason)} However, you requested {total} tokens ({prompt_tokens} in the"
                f" {field}, {wanted} in the completion). Please reduce the length of the {field} or completion.",
                limit=limit,
                got=prompt_tokens if too_long else total,
                answer_tokens=0 if too_long else wanted,
                param=field if too_long else "max_tokens",
            )
        if given is not None:
            self._check_min_tokens(params, wanted)
            return wanted
        left = min(context, pool) - prompt_tokens
        if self._limits.max_tokens is not None:
            left = min(left, self._limits.max_tokens)
        self._check_min_tokens(params, left)
        return left

    @staticmethod
    def _check_min_tokens(params: SamplingParams, left: int) -> None:
        if params.min_tokens > left:
            raise InvalidRequest(
                f"min_tokens must be at most what there is room for ({left}), got {params.min_tokens}",
                param="min_tokens",
            )

    def _sequences(self, params: SamplingParams, seed: int) -> tuple[SequenceSpec, ...]:
        """All of a request's sequences share the seed; the fork number tells their draws apart."""
        given = None if params.seed == -1 else params.seed
        first = self._states.of(params, (seed if given is None else given) & SEED_MASK)
        others = (
            msgspec.structs.replace(first, fork=fork, prompt_logprobs=-1)  # the prompt is the same for all
            for fork in range(1, params.num_sequences)
        )
        return tuple(SequenceSpec(row=next(self._rows), sampling=state) for state in (first, *others))

    def pooled(self, prompt: Prompt, params: PoolingParams) -> tuple[TokensPrompt, PoolingState]:
        """The tokens of a prompt that is to be pooled, and what the worker is told of it.

        Raises:
            InvalidRequest: the model cannot pool it so; names the field.
        """
        ability = require_pooling(self._ready)
        ability.resolve(params)  # before anything is tokenized
        tokens = self._tokenize(prompt)
        field = prompt_field(prompt)
        self._check_prompt(field, tokens.token_ids)
        for limit in (self._limits.max_model_len, self._pool_tokens):
            if len(tokens.token_ids) > limit:
                raise too_long(field, limit, len(tokens.token_ids), "has")
        return tokens, ability.resolve(params, segment=tokens.segment)

    def _tokenize(self, prompt: Prompt) -> TokensPrompt:
        """Render, tokenize, cut. Slow for long texts."""
        if isinstance(prompt, EmbedsPrompt):
            raise InvalidRequest(
                "prompt_embeds are for generation: what is pooled are texts or tokens",
                param="prompt_embeds",
                code="unsupported_parameter",
            )
        longest = self._limits.max_model_len
        if isinstance(prompt, PairPrompt):
            return self._tokenize_pair(prompt, longest)
        tokens = tokenize(prompt, self._tokenizer, self._template, longest)
        segment = prompt.segment if isinstance(prompt, TokensPrompt) and prompt.truncation is None else 0
        return msgspec.structs.replace(tokens, segment=segment)

    def _tokenize_pair(self, prompt: PairPrompt, longest: int) -> TokensPrompt:
        truncation, field = prompt.truncation, prompt_field(prompt)
        texts = [prompt.text, prompt.second]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"{field} must be two texts", param=field, code="invalid_type")
        keep, side = kept_tokens(truncation, longest, 0), "right" if truncation is None else truncation.side
        letters = (longest if keep is None else keep + CUT_MARGIN) * self._tokenizer.longest_token
        cut = False
        if keep is not None:
            cut = any(len(text) > letters for text in texts)
            texts = [text[-letters:] if side == "left" else text[:letters] for text in texts]
        elif sum(map(len, texts)) > letters:
            got = sum(map(len, texts)) // self._tokenizer.longest_token
            raise too_long(field, longest, got, "has at least")
        for text in texts:
            check_unicode(field, text)
        form = None if self._ready.pooling is None else self._ready.pooling.pair_format
        if form is not None:
            ids, shortened = formatted_pair(self._tokenizer, form, (texts[0], texts[1]), keep, side)
            return TokensPrompt(ids, truncated=cut or shortened)
        token_ids, segment, shortened = self._tokenizer.encode_pair(texts[0], texts[1], most=keep, side=side)
        return TokensPrompt(token_ids, segment=segment, truncated=cut or shortened)

    def _pooling(self, message: PrepareRequest, params: PoolingParams) -> Prepared:
        """One sequence, which ends with its prompt."""
        tokens, state = self.pooled(message.submission.prompt, params)
        row, prompt = next(self._rows), array("i", tokens.token_ids).tobytes()
        opened = OpenRequest(
            request=message.request,
            outbox=message.outbox,
            prompt_token_ids=prompt,
            rows=(row,),
            stop_strings=(),
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            detokenize=False,
            truncated=tokens.truncated,
            logprobs=None,
            prompt_logprobs=None,
        )
        submitted = SubmitRequest(
            request=message.request,
            request_id=message.submission.request_id,
            arrival=message.arrival,
            prompt=prompt,
            sequences=(SequenceSpec(row=row, sampling=SamplingState(temperature=0.0)),),
            max_tokens=1,
            min_tokens=0,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
            priority=params.priority,
            tenant=message.submission.tenant,
            cache_salt=message.submission.cache_salt,
            prompt_keys=self._prompt_keys(message, prompt),
            adapter=message.adapter,
            streaming=False,
            deadline=message.deadline,
            pooling=state,
        )
        return Prepared(opened, submitted)


def _leases(prompt: TokensPrompt, hints: KVHints) -> tuple[PrefixLease, ...]:
    whole = (PrefixLease(len(prompt.token_ids), hints.retain),) if hints.retain > 0 else ()
    return (*prompt.leases, *whole)


def _shown_logprobs(params: SamplingParams) -> int | None:
    if params.logprobs is None and (params.selects or params.logprob_token_ids):
        return 0
    return params.logprobs


def require_pooling(ready: WorkerReady) -> PoolingAbility:
    """Raises InvalidRequest for a model that only writes text."""
    if ready.pooling is None:
        raise InvalidRequest(
            "the model does not support pooling; it generates text", param="model", code="unsupported_task"
        )
    return ready.pooling
