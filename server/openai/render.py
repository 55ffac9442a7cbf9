"""POST /v1/chat/completions/render and /v1/completions/render: the prompt of a request, without an answer."""

import secrets
from collections.abc import Sequence
from functools import partial

import msgspec

from troupellm.actors.admission.prompts import estimate_tokens
from troupellm.models.tokenizer.tokenizer import let_others_run
from troupellm.protocol.api.chat import ChatRequest, CompletionRequest
from troupellm.protocol.api.rendered import RenderedRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import Prompt
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.counting import charged
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.chat_turn import prepare
from troupellm.server.openai.parameters import completion_prompts, refuse_unsupported, renames, sampling_params

_SHOWN = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "max_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "thinking_token_budget",
)  # fmt: skip


async def chat(host: ServerState, exchange: Exchange, request: ChatRequest) -> None:
    """One rendered request."""
    model = await host.check_model(exchange, request.model)
    exchange.renames = renames(request)
    prepared = await prepare(host, exchange, request)
    host.skipped.report(exchange, prepared.skipped)
    made = _Made(host, exchange, request, prepared.params, model, "chatcmpl")
    await exchange.respond(200, await made.body(prepared.prompt))


async def completions(host: ServerState, exchange: Exchange, request: CompletionRequest) -> None:
    """A list of rendered requests, one for each prompt."""
    model = await host.check_model(exchange, request.model)
    exchange.renames = renames(request)
    refuse_unsupported(request)
    read = partial(completion_prompts, request, host.config.max_prompts)
    prompts = await offload(read) if is_large(exchange) else read()
    made = _Made(host, exchange, request, sampling_params(request, host.require()), model, "cmpl")
    bodies = [await made.body(prompt) for prompt in prompts]
    await exchange.respond(200, b"[" + b",".join(bodies) + b"]")


class _Made:
    """The common part of all prompts of a request."""

    def __init__(
        self,
        host: ServerState,
        exchange: Exchange,
        request: ChatRequest | CompletionRequest,
        params: SamplingParams,
        model: str,
        kind: str,
    ) -> None:
        self._host = host
        self._exchange = exchange
        self._request = request
        self._params = params
        self._model = model
        self._name = f"{kind}-{request.request_id or secrets.token_hex(16)}"

    async def body(self, prompt: Prompt) -> bytes:
        """JSON.

        Raises:
            InvalidRequest: the prompt cannot be rendered or tokenized.
            ContextLengthExceeded: it is too long.
        """
        engine, params = self._host.require(), self._params
        fields = {name: value for name in _SHOWN if (value := getattr(params, name)) is not None}
        fields["max_tokens"] = params.max_tokens

        def encode(tokens: Sequence[int]) -> bytes:
            charge.tokens = len(tokens)
            if max(tokens, default=0) >= width:
                raise InvalidRequest(f"prompt must hold token ids in [0, {width - 1}]", param="prompt")
            let_others_run(len(tokens))
            return msgspec.json.encode(
                RenderedRequest(
                    request_id=self._name,
                    model=self._model,
                    token_ids=tokens,
                    sampling_params=fields,
                    stream=bool(self._request.stream),
                    cache_salt=self._request.cache_salt,
                    priority=params.priority,
                )
            )

        width = engine.limits.vocab_width
        limit, answer = engine.limits.max_model_len, params.max_tokens or 1
        async with charged(engine, self._exchange, estimate_tokens(prompt)) as charge:
            return await self._host.counting.tokens(engine, self._exchange.key, prompt, encode, limit, answer)
