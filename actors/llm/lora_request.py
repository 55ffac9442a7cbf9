"""`LoRARequest`: an adapter as scripts for vLLM name it, with name, number and path."""

from collections.abc import Sequence

import msgspec

from troupellm.actors.engine.adapter_sources import plain_folder
from troupellm.actors.engine.engine import Engine
from troupellm.protocol.errors import InvalidRequest


class LoRARequest(msgspec.Struct, frozen=True):
    """The adapter of a request.

    Raises:
        InvalidRequest: no name, or a number below 1.
    """

    lora_name: str
    lora_int_id: int = 1
    """Accepted, as vLLM has it; name and path decide."""
    lora_path: str = ""
    """A folder in PEFT's format. Empty: an adapter of that name is served already."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Read the folder again, though the name stands for it already."""

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise InvalidRequest("lora_name must not be empty", param="lora_name")
        if self.lora_int_id < 1:
            raise InvalidRequest(f"lora_int_id must be at least 1, got {self.lora_int_id}", param="lora_int_id")


def lora_requests(given: object, count: int) -> list[LoRARequest | None]:
    """The adapter of each of so many prompts.

    Args:
        given: one for all, a list with one for each, or None.

    Raises:
        InvalidRequest: there are more or less of them, or one is something else.
    """
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * count
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts need as many lora_request, got {len(each)}", param="lora_request")
    found: list[LoRARequest | None] = []
    for request in each:
        if request is not None and not isinstance(request, LoRARequest):
            kind = type(request).__name__
            raise InvalidRequest(f"lora_request must be a LoRARequest, got {kind}", param="lora_request")
        found.append(request)
    return found


async def serve(engine: Engine, request: LoRARequest) -> str:
    """The name of a request's adapter, once the engine serves it.

    Raises:
        TroupeError: it cannot be served.
    """
    if not request.lora_path:
        return (await engine.find_adapter(request.lora_name)).name
    folder = plain_folder(request.lora_path)
    known = {info.name: info.folder for info in engine.adapters}
    if known.get(request.lora_name) != folder or request.load_inplace:
        await engine.load_adapter(request.lora_name, folder, replace=True, base_model_name=request.base_model_name)
    return request.lora_name
