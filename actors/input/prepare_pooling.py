"""Decisions of the input processor about a pooling request, beside those that it makes about every request."""

from array import array

import msgspec

from troupellm.actors.input.prepare import Prepared, Preparer
from troupellm.actors.input.tokenize import CUT_MARGIN, check_unicode, kept_tokens, prompt_field, tokenize, too_long
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import EmbedsPrompt, PairPrompt, PrepareRequest, Prompt, TokensPrompt
from troupellm.protocol.messages.output import OpenRequest
from troupellm.protocol.messages.scheduler import SequenceSpec, SubmitRequest
from troupellm.protocol.messages.worker import SamplingState, WorkerReady
from troupellm.protocol.params.pooling import PoolingAbility, PoolingParams, PoolingState


class PoolingPreparer(Preparer):
    """Prepares requests of both kinds."""

    def prepare(self, message: PrepareRequest, seed: int) -> Prepared:
        if message.pooling is None:
            return super().prepare(message, seed)
        tokens, state = self.pooled(message.prompt, message.pooling)
        return self._request(message, tokens, state, message.pooling.priority)

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
        token_ids, segment, shortened = self._tokenizer.encode_pair(texts[0], texts[1], most=keep, side=side)
        return TokensPrompt(token_ids, segment=segment, truncated=cut or shortened)

    def _request(self, message: PrepareRequest, tokens: TokensPrompt, state: PoolingState, priority: int) -> Prepared:
        """One sequence, which ends with its prompt."""
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
            request_id=message.request_id,
            arrival=message.arrival,
            prompt=prompt,
            sequences=(SequenceSpec(row=row, sampling=SamplingState(temperature=0.0)),),
            max_tokens=1,
            min_tokens=0,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
            priority=priority,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            prompt_keys=self._prompt_keys(message, prompt),
            streaming=False,
            deadline=message.deadline,
            pooling=state,
        )
        return Prepared(opened, submitted)


def require_pooling(ready: WorkerReady) -> PoolingAbility:
    """Raises InvalidRequest for a model that only writes text."""
    if ready.pooling is None:
        raise InvalidRequest(
            "the model does not support pooling; it generates text", param="model", code="unsupported_task"
        )
    return ready.pooling
