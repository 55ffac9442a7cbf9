"""From request bodies to prompts and pooling parameters, and refusals of what is not served."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from troupellm.actors.input.prepare import require_pooling
from troupellm.protocol.api.chat import TokenizeRequest
from troupellm.protocol.api.pooling import InputFields, PoolingFields, VectorFields
from troupellm.protocol.config.kv_hints import KVHints
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import Prompt, TextPrompt, TokensPrompt, Truncation
from troupellm.protocol.params.pooling import PoolingParams, PoolingTask
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.openai.balancer_headers import replica_of
from troupellm.server.openai.parameters import chat_prompt, check_cache_salt, truncation_of, unsupported
from troupellm.server.openai.past_messages import plain_messages

ENCODINGS = ("float", "base64")


def refuse_unsupported(request: PoolingFields) -> None:
    """
    Raises:
        InvalidRequest: names a field that would change the answer and that this server does not implement.
    """
    for field in msgspec.structs.fields(request):
        if field.type is Any and getattr(request, field.name):
            raise unsupported(field.name)
    check_cache_salt(request.cache_salt)


def pooling_params(engine: ServedEngine, request: PoolingFields, task: PoolingTask | None) -> PoolingParams:
    """Checked against the served model.

    Raises:
        InvalidRequest: names the field; `model` where the model does not do it.
    """
    dimensions, activation = None, request.use_activation
    if isinstance(request, VectorFields):
        dimensions = request.dimensions
        if activation is None:
            activation = request.normalize
    params = PoolingParams(task=task, dimensions=dimensions, use_activation=activation, priority=request.priority or 0)
    require_pooling(engine.ready).resolve(params)
    return params


def options(exchange: Exchange, request: PoolingFields, answer_id: str) -> dict[str, Any]:
    """The engine's options beside prompts and parameters, of every route: HTTP never waits for its first place."""
    return {
        "wait": False,
        "request_id": answer_id,
        "tenant": exchange.key,
        "cache_salt": (request.cache_salt or "").encode(),
        "deadline": request.queue_timeout,
        "adapter": exchange.adapter,
        "hints": KVHints(replica=replica_of(exchange)),
        "taken": exchange.prompt_taken if exchange.room is not None and is_large(exchange) else None,
    }


def prompts_of(request: InputFields, most: int) -> list[Prompt]:
    """The inputs of a call: one text, one list of token ids, a list of either, or one conversation.

    Raises:
        InvalidRequest: none, both, empty, mixed, or more than `most`.
    """
    truncation = truncation_of(request, "right")
    if request.messages is not None:
        if request.input is not None:
            raise InvalidRequest("give either input or messages, not both", param="input")
        return [_conversation(request, truncation)]
    given = request.input
    if given is None:
        raise InvalidRequest("input is missing", param="input", code="missing_required_parameter")
    add_special_tokens = request.add_special_tokens is not False
    if isinstance(given, str):
        return [TextPrompt(given, add_special_tokens, truncation)]
    if not given:
        raise InvalidRequest("input must not be empty", param="input", code="empty_array")
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise InvalidRequest("input must not mix texts, token ids and lists of token ids", param="input")
    if kinds == {int}:
        return [TokensPrompt(cast(list[int], given), truncation)]
    check_number("input", len(given), most)
    if kinds == {str}:
        return [TextPrompt(text, add_special_tokens, truncation) for text in cast(list[str], given)]
    lists = cast(list[list[int]], given)
    empty = next((index for index, ids in enumerate(lists) if not ids), None)
    if empty is not None:
        raise InvalidRequest(f"input[{empty}] must not be empty", param=f"input[{empty}]")
    return [TokensPrompt(ids, truncation) for ids in lists]


@contextmanager
def naming(exchange: Exchange, name: Callable[[int], str]) -> Iterator[None]:
    """Errors about a prompt of the call inside call it as the request does.

    Args:
        name: of the prompt with an index.
    """
    try:
        yield
    except InvalidRequest as error:
        exchange.renames = {"prompt": name(error.entry or 0)}
        raise


def name_in(field: str, given: object) -> Callable[[int], str]:
    """Names of the prompts that a field gives: its entries, unless it is one text or one list of token ids."""
    many = isinstance(given, list) and not isinstance(given[0], int)
    return lambda index: f"{field}[{index}]" if many else field


def check_number(field: str, number: int, most: int) -> None:
    """Raises InvalidRequest for more than a call may have."""
    if number > most:
        raise InvalidRequest(
            f"{field} must have at most {most} entries, got {number}", param=field, code="array_above_max_length"
        )


def as_texts(field: str, texts: str | list[str], most: int) -> Sequence[str]:
    """One text stands for a list of one.

    Raises:
        InvalidRequest: none, or too many.
    """
    if isinstance(texts, str):
        return [texts]
    if not texts:
        raise InvalidRequest(f"{field} must not be empty", param=field, code="empty_array")
    check_number(field, len(texts), most)
    return texts


def _conversation(request: InputFields, truncation: Truncation | None) -> Prompt:
    messages = request.messages or []
    rendered = TokenizeRequest(
        messages=messages,
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return msgspec.structs.replace(chat_prompt(rendered, plain_messages(messages).messages), truncation=truncation)
