"""POST /tokenize and /detokenize."""

from collections.abc import Sequence

import msgspec

from troupellm.actors.admission.prompts import estimate_tokens
from troupellm.models.tokenizer.tokenizer import let_others_run
from troupellm.protocol.api.chat import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from troupellm.protocol.api.model_info import TokenizerInfo
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt, TextPrompt
from troupellm.protocol.params.tools import check_tools
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.counting import charged
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.chat_turn import plain_tools
from troupellm.server.openai.parameters import chat_prompt, refuse_unsupported
from troupellm.server.openai.past_messages import plain_messages

INLINE_TOKENS = 4_096
"""More tokens are decoded on a thread."""


async def tokenize(host: ServerState, exchange: Exchange, request: TokenizeRequest) -> None:
    engine = host.require()
    if request.model is not None:
        await host.check_model(exchange, request.model)
    refuse_unsupported(request, trust_chat_template=host.config.trust_request_chat_template)

    def encode(tokens: Sequence[int]) -> bytes:
        charge.tokens = len(tokens)
        strings = None
        if request.return_token_strs:
            strings = [engine.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
        limit = engine.limits.max_model_len
        response = TokenizeResponse(count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=strings)
        let_others_run(len(tokens))
        body = msgspec.json.encode(response)
        let_others_run(len(tokens))  # before the list is freed
        return body

    prompt = await offload(_prompt, request) if is_large(exchange) else _prompt(request)
    async with charged(engine, exchange, estimate_tokens(prompt)) as charge:
        body = await host.counting.tokens(engine, exchange.key, prompt, encode)
    await exchange.respond(200, body)


async def detokenize(host: ServerState, exchange: Exchange, request: DetokenizeRequest) -> None:
    engine = host.require()
    if request.model is not None:
        await host.check_model(exchange, request.model)

    def decode() -> bytes:
        width = engine.limits.vocab_width
        if not all(0 <= token < width for token in request.tokens):
            raise InvalidRequest(f"tokens must be token ids in [0, {width - 1}]", param="tokens")
        text = engine.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return msgspec.json.encode(DetokenizeResponse(text))

    number = len(request.tokens)
    async with charged(engine, exchange, number) as charge:
        charge.tokens = number
        body = decode() if number <= INLINE_TOKENS else await host.counting.run(exchange.key, number, decode)
    await exchange.respond(200, body)


async def info(host: ServerState, exchange: Exchange, _: None) -> None:
    engine = host.require()
    template = engine.chat_format.template
    shown = TokenizerInfo(
        vocab_size=engine.limits.vocab_width,
        model_max_length=engine.limits.max_model_len,
        eos_token_ids=sorted(engine.tokenizer.eos_token_ids),
        special_tokens=template.special_tokens,
        chat_template=template.sources.get("default"),
    )
    await exchange.respond(200, msgspec.json.encode(shown))


def _prompt(request: TokenizeRequest) -> TextPrompt | ChatPrompt:
    if request.messages is not None:
        if request.prompt is not None:
            raise InvalidRequest("give either prompt or messages, not both", param="prompt")
        messages = plain_messages(request.messages).messages
        return chat_prompt(request, messages, check_tools(plain_tools(request.tools)))
    if request.prompt is None:
        raise InvalidRequest("prompt is missing", param="prompt", code="missing_required_parameter")
    return TextPrompt(request.prompt, request.add_special_tokens is not False)
