"""The served models in Ollama's form: /api/tags, /api/ps, /api/show, /api/version and /api/pull."""

import hashlib
import re
from datetime import UTC, datetime

import msgspec

from troupellm.protocol.api.ollama import (
    OllamaDetails,
    OllamaModel,
    OllamaModelInfo,
    OllamaModels,
    OllamaNamedRequest,
    OllamaStatus,
    OllamaVersion,
)
from troupellm.server.base.exchange import LINES, Exchange
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.host.server_state import ServerState, may_use
from troupellm.server.ollama.lines import timestamp
from troupellm.server.ollama.translate import model_field, plain_name, tagged
from troupellm.server.openai.models import tasks_of

API_VERSION = "0.13.0"
"""The release of Ollama whose API this is: clients look whether it is new enough for them."""
NEVER = "2400-01-01T00:00:00Z"
"""When the model is unloaded: a moment so far off shows as `Forever`."""
_CLASS = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|ForMaskedLM|Model)$")
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_CAPABILITIES = {"generate": "completion", "embed": "embedding"}
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Defaults of the model, and their names here."""


async def tags(host: ServerState, exchange: Exchange, _: None) -> None:
    engine = host.require()
    names = [*engine.model_names, *[info.name for info in await engine.list_adapters()]]
    models = [_model(host, name) for name in names if may_use(engine, exchange, name)]
    await exchange.respond(200, msgspec.json.encode(OllamaModels(models=models)))


async def loaded(host: ServerState, exchange: Exchange, _: None) -> None:
    """All names of the one model, which stays in memory."""
    engine = host.require()
    ready = engine.ready
    models = [
        msgspec.structs.replace(
            _model(host, name),
            expires_at=NEVER,
            size_vram=0 if ready.device.startswith("cpu") else ready.weight_bytes,
            context_length=ready.max_model_len,
        )
        for name in engine.model_names
        if may_use(engine, exchange, name)
    ]
    await exchange.respond(200, msgspec.json.encode(OllamaModels(models=models)))


async def show(host: ServerState, exchange: Exchange, request: OllamaNamedRequest) -> None:
    engine = host.require()
    name = await _find(host, exchange, request)
    details, ready = _details(engine), engine.ready
    parameters = [f"{shown} {engine.defaults[name]}" for name, shown in _PARAMETERS.items() if name in engine.defaults]
    info: dict[str, str | int] = {
        "general.architecture": details.family,
        "general.basename": name,
        "general.parameter_count": ready.num_parameters,
        f"{details.family}.context_length": ready.max_model_len,
        f"{details.family}.vocab_size": ready.vocab_width,
    }
    if ready.hidden_size:
        info[f"{details.family}.embedding_length"] = ready.hidden_size
    body = OllamaModelInfo(
        modelfile=f"FROM {tagged(name)}\n",
        parameters="\n".join(parameters),
        template="",
        details=details,
        model_info=info,
        capabilities=_capabilities(engine),
        modified_at=_modified(host),
    )
    await exchange.respond(200, msgspec.json.encode(body))


async def version(host: ServerState, exchange: Exchange, _: None) -> None:
    await exchange.respond(200, msgspec.json.encode(OllamaVersion(version=API_VERSION)))


async def pull(host: ServerState, exchange: Exchange, request: OllamaNamedRequest) -> None:
    """A model that is served needs no download, and no request downloads another one.

    Raises:
        ModelNotFound: it is not served.
    """
    await _find(host, exchange, request)
    body = msgspec.json.encode(OllamaStatus(status="success"))
    if request.stream is False:
        await exchange.respond(200, body)
    else:
        await exchange.respond(200, body + b"\n", content_type=LINES)


async def _find(host: ServerState, exchange: Exchange, request: OllamaNamedRequest) -> str:
    """The served name that a body means.

    Raises:
        ModelNotFound: there is none.
    """
    return await host.check_model(exchange, plain_name(model_field(request), host.require().model_names))


def _model(host: ServerState, name: str) -> OllamaModel:
    engine = host.require()
    digest = hashlib.sha256(f"{host.fingerprint()}\0{name}".encode()).hexdigest()
    shown = tagged(name)
    return OllamaModel(
        name=shown,
        model=shown,
        modified_at=_modified(host),
        size=engine.ready.weight_bytes,
        digest=digest,
        details=_details(engine),
    )


def _details(engine: ServedEngine) -> OllamaDetails:
    ready = engine.ready
    family = _CLASS.sub("", ready.architecture).lower() or "unknown"
    return OllamaDetails(
        parent_model="",
        format="safetensors",
        family=family,
        families=[family],
        parameter_size=_human(ready.num_parameters),
        quantization_level=ready.quantization.upper() or _DTYPES.get(ready.dtype, ready.dtype),
    )


def _capabilities(engine: ServedEngine) -> list[str]:
    found = [_CAPABILITIES[task] for task in tasks_of(engine.ready) if task in _CAPABILITIES]
    if engine.ready.generates:
        found += ["tools"] * (engine.chat_format.chat_syntax.calls is not None)
        found += ["thinking"] * engine.chat_format.thinks
    return found


def _modified(host: ServerState) -> str:
    return timestamp(datetime.fromtimestamp(host.created, UTC))


def _human(number: int) -> str:
    """As Ollama writes sizes of models: 3.97M, 8.0B."""
    for unit, name in _UNITS:
        if number >= unit:
            return f"{number / unit:.{1 if unit > 1e6 else 2}f}{name}"
    return str(number)
