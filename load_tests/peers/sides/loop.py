"""The loop of every contestant's process: requests in as JSON lines, answers out; nothing is shared but those lines.

Only the standard library, for this runs in the environments of others.
"""

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any, Protocol


class Side(Protocol):
    """An engine with one model loaded: `model` (a path) in `precision`, computed by so many `threads`, for at most so
    many `sequences` at once, of at most `length` tokens each and `tokens` together."""

    versions: dict[str, str]

    def answer(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """All prompts at once, greedily, exactly `output_len` tokens each, end tokens included."""


def main() -> int:
    """`python -m troupellm.load_tests.peers.sides.loop MODULE`: the module's `make(**settings)` gives the side."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is for the log
    module, side = importlib.import_module(sys.argv[1]), None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: dict[str, Any]
            if request["do"] == "make":
                side = module.make(**request["settings"])
                reply = {"versions": side.versions}
            elif request["do"] == "answer":
                assert side is not None
                begin = time.perf_counter()
                answers = side.answer(request["prompts"], request["output_len"])
                reply = {"seconds": time.perf_counter() - begin, "answers": answers}
            else:
                reply = module.prepare(**request["settings"]) or {}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
