"""A process that resolves models as the product does: its environment is all that a test sets.

Reads one JSON object a line, {"config": ..., "env": ...}, and answers with the path, or the error and its hint.
"""

import json
import os
import sys

import msgspec

from troupellm.models.source import resolve_model
from troupellm.protocol.config import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.worker import LoadProgress


def answer(line: str) -> dict[str, object]:
    request = json.loads(line)
    for name, value in request["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    told: list[LoadProgress] = []
    outcome: dict[str, object] = {}
    try:
        outcome["path"] = str(resolve_model(ModelConfig(**request["config"]), told.append))
    except ModelLoadError as error:
        outcome |= {"error": error.message, "hint": error.hint}
    return outcome | {"progress": msgspec.to_builtins(told)}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


if __name__ == "__main__":
    main()
