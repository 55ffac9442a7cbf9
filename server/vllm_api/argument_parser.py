"""`FlexibleArgumentParser`: a parser that takes vLLM's spellings of flags."""

import argparse
from collections.abc import Sequence
from typing import Any

from troupellm.server.cli.flags import long_spelling, normalise
from troupellm.server.cli.json_keys import JsonKeys


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--foo_bar` for `--foo-bar`, vLLM's short flags such as `-tp` and `-O0`, and keys of an object as
    `--speculative-config.method ngram`. A flag that the script declares itself is left as it is spelt, and replaces one
    of `EngineArgs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"conflict_handler": "resolve", **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(self._arguments() if args is None else args)
        return super().parse_known_args(self._respelt(words), namespace)

    @staticmethod
    def _arguments() -> list[str]:
        import sys

        return sys.argv[1:]

    def _respelt(self, words: list[str]) -> list[str]:
        known, keys = self._option_string_actions, JsonKeys()
        result: list[str] = []
        pending = list(words)
        while pending:
            word = pending.pop(0)
            if word == "--":
                return keys.merged_into([*result, word, *pending])
            if not word.startswith("-") or word.partition("=")[0] in known:
                result.append(word)
                continue
            (spelt,) = normalise([long_spelling(word)])
            name, equals, value = spelt.partition("=")
            whole, dot, path = name.partition(".")
            if dot and whole in known:
                keys.add(whole, path, value if equals else (pending.pop(0) if pending else ""))
            else:
                result.append(spelt)
        return keys.merged_into(result)
