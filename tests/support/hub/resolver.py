"""A process that resolves models as the product does: its environment is all that a test sets.

Reads one JSON object a line, {"config": ..., "env": ..., "checked": ...}, and answers with the path, or the error and
its hint. Checked models have a config.json that the engine reads.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import msgspec

from troupellm.models.chat_template.template_process import Renderer, TemplateProcesses
from troupellm.models.hub.source import resolve_model
from troupellm.models.load.early_check import check_before_weights
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress


def answer(line: str, renderer: Renderer) -> dict[str, object]:
    request = json.loads(line)
    for name, value in request["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    notes: list[LoadProgress] = []
    outcome: dict[str, object] = {}
    try:
        config = ModelConfig(**request["config"])
        check = partial(check_before_weights, config=config, renderer=renderer) if request["checked"] else unchecked
        outcome["path"] = str(resolve_model(config, notes.append, check))
    except ModelLoadError as error:
        outcome |= {"error": error.message, "hint": error.hint}
    return outcome | {"progress": msgspec.to_builtins(notes)}


def unchecked(folder: Path) -> None:
    """Of models that are never read."""


def main() -> None:
    templates = TemplateProcesses()
    for line in sys.stdin:
        print(json.dumps(answer(line, templates)), flush=True)
    templates.close()


if __name__ == "__main__":
    main()
