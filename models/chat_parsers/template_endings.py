"""The end of a rendered prompt, which shows if the model's answer begins inside its reasoning."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from troupellm.models.chat_template.template import ChatTemplate, SlowTemplate, check_template_kwargs
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.tools import Effort

_MOST: Final = 64
"""Ways to begin an answer that are remembered, beside the usual ones."""
_LONGEST: Final = 256
"""Characters."""
_EFFORT: Final = "reasoning_effort"

Kwargs = Mapping[str, Any]


class Openings:
    """Seen on a chat of one message. The usual ones are seen before requests come. Thread-safe."""

    def __init__(self, template: ChatTemplate, switches: Sequence[str], *, wanted: bool = True) -> None:
        """
        Args:
            switches: variables of the template that turn thinking on and off.
            wanted: the endings of common prompts are rendered in advance.
        """
        self._template = template
        self._names = frozenset({_EFFORT, *switches})
        usual = {_key(kwargs): kwargs for kwargs in _usual(switches)} if wanted else {}
        self._usual = {key: self._rendered(kwargs) for key, kwargs in usual.items()}
        self._others: dict[tuple[tuple[str, Any], ...], str] = {}

    def knows(self, kwargs: Kwargs) -> bool:
        """True if `of` need not render, which waits for another process."""
        key = _key({name: value for name, value in kwargs.items() if name in self._names})
        try:
            return key in self._usual or key in self._others
        except TypeError:  # a value that cannot be a key
            return True

    def of(self, kwargs: Kwargs) -> str:
        """The end of a rendered prompt, before the answer; empty if it cannot be rendered.

        Args:
            kwargs: variables of the template; those that do not concern thinking change nothing.
        """
        kwargs = {name: value for name, value in kwargs.items() if name in self._names}
        key = _key(kwargs)
        try:
            known = self._usual.get(key, self._others.get(key))
        except TypeError:  # a value that cannot be a key
            return ""
        if known is None:
            known = self._rendered(kwargs)
            if len(self._others) >= _MOST:
                self._others.clear()
            self._others[key] = known
        return known

    def _rendered(self, kwargs: Kwargs) -> str:
        try:
            check_template_kwargs(kwargs)  # before one of them can collide with an argument below
            text = self._template.render([{"role": "user", "content": "."}], add_generation_prompt=True, **kwargs)
        except (InvalidRequest, SlowTemplate):  # the request itself is refused for it
            return ""
        return text[-_LONGEST:]


def _usual(switches: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Common settings of thinking: none, on or off, or an effort; see `ChatFormat.with_effort`."""
    yield {}
    for on in (True, False):
        yield dict.fromkeys(switches, on)
        yield from ({switch: on} for switch in switches)
    for effort in get_args(Effort):
        yield dict.fromkeys(switches, effort != "none") | {_EFFORT: effort}


def _key(kwargs: Kwargs) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(kwargs.items(), key=lambda item: item[0]))
