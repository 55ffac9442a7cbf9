"""Refuses rules of a tokenizer.json that would take too long, or make a text much longer, for untrusted texts.

The number of steps is limited. Patterns that published tokenizers do not have, and replacements that make a text
longer, are tried in a child process with little memory and time; `tokenizer_probe` is its program.
"""

import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from troupellm.models.processes.module_path import child_environment
from troupellm.models.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from troupellm.protocol.errors import ModelLoadError

MOST_STEPS = 32
PATIENCE = 20.0
"""Seconds until the child is ended if it does not end by itself; it limits its own processor time."""
_USUAL = frozenset(pattern for rule in PRE_TOKENIZERS.values() for pattern in rule.patterns) | {
    " {2,}",
    r"\s+",
    r"\d",
    r"\p{N}",
    r"\p{N}{1,3}",
    r"\s",
    "[\r\n]",
    r"\w+|[^\w\s]+",
}
_LONGEST = 4
"""Characters that a usual step puts in front of a text."""
_HINT = "use the tokenizer that the model's maker published"
_LONGEST_MAPPED = 64
"""Bytes that a table of characters puts in place of one; Unicode's compatibility forms need 33."""


class Rules(msgspec.Struct):
    """The parts of tokenizer.json that work on a text before its model and after it."""

    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def check_rules(definition: bytes, file: str) -> None:
    """
    Args:
        definition: a tokenizer.json.
        file: its name, for messages.

    Raises:
        ModelLoadError: too many steps, or steps that are too slow or make a text too long.
    """
    rules = msgspec.json.decode(definition, type=Rules)
    unusual = False
    for name in rules.__struct_fields__:
        steps = [*_steps(getattr(rules, name))]
        if len(steps) > MOST_STEPS:
            raise ModelLoadError(f"{file}: {name} has {len(steps)} steps; at most {MOST_STEPS} are run")
        for step in steps:
            _check_table(step, file)
        unusual = unusual or any(map(_is_unusual, steps))
    if unusual and (why := _tried(rules)) is not None:
        raise ModelLoadError(f"{file}: {why}", hint=_HINT)


def _steps(rule: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A rule without its sequences; a file nests at most as deep as the JSON reader allows.

    The library passes over keys that a step does not have, so steps within a step that is no sequence hide nothing.
    """
    waiting = [rule]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        inner = step.get("normalizers") or step.get("pretokenizers") or step.get("decoders")
        if isinstance(inner, list):
            waiting += inner
        if not isinstance(inner, list) or step.get("type") != "Sequence":
            yield step


def _is_unusual(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern")
    content = step.get("content")
    found = pattern.get("Regex") if isinstance(pattern, dict) else None
    prepended = step.get("prepend")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    longer = isinstance(content, str) and len(content) > (len(replaced) if isinstance(replaced, str) else 1)
    longer |= isinstance(prepended, str) and len(prepended) > _LONGEST
    return longer or replaced == "" or (found is not None and found not in _USUAL)


def check_charsmap(charsmap: bytes, file: str) -> None:
    """Refuse a table of SentencePiece that makes a text much longer.

    Args:
        charsmap: the length of a trie, the trie, and the texts that take the place of characters, each with a zero
            behind it.
        file: its name, for messages.

    Raises:
        ModelLoadError: one of those texts is too long.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    longest = max(map(len, texts.split(b"\0")))
    if longest > _LONGEST_MAPPED:
        raise ModelLoadError(
            f"{file}: its table of characters puts {longest} bytes in place of one; at most {_LONGEST_MAPPED} are read",
            hint=_HINT,
        )


def _check_table(step: dict[str, Any], file: str) -> None:
    table = step.get("precompiled_charsmap")
    if isinstance(table, str):
        with suppress(ValueError):  # the library refuses a table in another form
            check_charsmap(base64.b64decode(table), file)


def _tried(rules: Rules) -> str | None:
    """Why the rules are refused, or none."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "troupellm.models.tokenizer.tokenizer_probe"],
            input=msgspec.json.encode(rules),
            capture_output=True,
            timeout=PATIENCE,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "its rules take too long for short texts"
    if done.returncode == 0:
        return None
    said = done.stdout.decode(errors="replace").strip()
    return said or "its rules take too long or too much memory for short texts"
