"""The same measure from a running server: prompts go in by HTTP, its counters say what verification accepted.

Start it with one of the drafters and a fixed draft length, and send it no other requests meanwhile:
``troupellm serve --speculative-config '{"method": "eagle", "model": "builtin", "num_speculative_tokens": 4, "adaptive":
false}'``.
"""

import json
import re
import urllib.request

from troupellm.models.hub.source import BUILTIN_NAME
from troupellm.training.drafters_tally import Tally

VERIFIED, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
_SECONDS = 120.0


def ask(address: str, asked: list[str], limit: int) -> Tally:
    """Let the server answer every prompt, one after the other and greedily; what that added to its counters.

    Answers that do not end within the limit are left out.

    Raises:
        LookupError: the server does not speculate.
    """
    total, before = Tally(), _read(address)
    for prompt in asked:
        body = {"model": BUILTIN_NAME, "prompt": prompt, "max_tokens": limit, "temperature": 0.0}
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{address}/v1/completions", data, headers), timeout=_SECONDS
        ) as answer:
            reason = json.load(answer)["choices"][0]["finish_reason"]
        after = _read(address)
        if reason == "stop":
            total.verified += after.verified - before.verified
            total.accepted += after.accepted - before.accepted
        before = after
    return total


def _read(address: str) -> Tally:
    with urllib.request.urlopen(f"{address}/metrics", timeout=_SECONDS) as answer:
        text = answer.read().decode()
    return Tally(_sum(text, VERIFIED), _sum(text, ACCEPTED))


def _sum(text: str, name: str) -> int:
    found = re.findall(rf"^{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    if not found:
        raise LookupError(f"the server has no counter {name}: it does not speculate")
    return round(sum(map(float, found)))
