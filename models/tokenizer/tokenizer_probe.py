"""A child process that runs a tokenizer's untrusted rules: reads them from its standard input as JSON. It writes the
reason for a refusal to its standard output, and ends with 0 if it accepts them."""

import json
import resource
import sys
import time
from typing import Any

from tokenizers import Tokenizer

from troupellm.models.processes.process_limits import limit

MOST_BYTES = 2**30
MOST_SECONDS = 0.1
"""Processor time for one sample."""
MOST_SECONDS_IN_ALL = 5
MOST_GROWTH = 16
LENGTH = 2048
BEGINNING = 64
"""Characters of each sample that are tried first: a text that grows fast takes long."""
_LETTERS = "aZ1 \n\t\r'.,-_é日ก\u0301🎉\u2581"
_MOST_LETTERS = 64


def replaced(rules: Any) -> list[str]:
    """The texts that steps replace."""
    if isinstance(rules, list):
        return [text for rule in rules for text in replaced(rule)]
    if not isinstance(rules, dict):
        return []
    text = rules.get("String")
    return [*([text] if isinstance(text, str) and text else []), *replaced([*rules.values()])]


def samples(rules: str) -> list[str]:
    """Texts that repeat one character each, those of the rules' patterns among them, with another one at the end; and
    texts that repeat what is replaced."""
    letters = dict.fromkeys([*_LETTERS, *(letter for letter in rules if letter.isprintable())])
    chosen = [*letters][:_MOST_LETTERS]
    mixed = ["".join(chosen) * (LENGTH // len(chosen)), "ab" * (LENGTH // 2), "a " * (LENGTH // 2)]
    mixed += [text * (1 + LENGTH // len(text)) for text in dict.fromkeys(replaced(json.loads(rules)))]
    return [*(letter * LENGTH + ("!" if letter != "!" else "a") for letter in chosen), *mixed]


def complaint(data: str) -> str | None:
    """Why the rules are refused."""
    rules = json.loads(data)
    model = {"type": "BPE", "vocab": {}, "merges": []}
    backend = Tokenizer.from_str(json.dumps(rules | {"version": "1.0", "added_tokens": [], "model": model}))
    texts = samples(json.dumps(rules, ensure_ascii=False))
    for text in [*(text[:BEGINNING] for text in texts), *texts]:
        said = _complaint_of(backend, text)
        if said is not None:
            return said
    return None


def _complaint_of(backend: Tokenizer, text: str) -> str | None:
    started = time.process_time()
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
    decoded = backend.decoder.decode([text]) if backend.decoder is not None else text
    longest = max(normalized, decoded, key=len)
    if len(longest.encode()) > MOST_GROWTH * len(text.encode()):
        return f"its rules make {len(longest)} characters of {len(text)}"
    if backend.pre_tokenizer is not None:
        backend.pre_tokenizer.pre_tokenize_str(normalized)
    taken = time.process_time() - started
    return f"its rules take {taken:.1f} s for {len(text)} characters" if taken > MOST_SECONDS else None


def main() -> int:
    limit(resource.RLIMIT_AS, MOST_BYTES)
    limit(resource.RLIMIT_CPU, MOST_SECONDS_IN_ALL)
    try:
        found = complaint(sys.stdin.read())
    except BaseException as error:  # a panic of the library is no Exception
        found = f"its rules cannot be run: {error}"
    sys.stdout.write(found or "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
