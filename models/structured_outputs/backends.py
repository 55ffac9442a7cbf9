"""The backends by name, and the check that a grammar can begin."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Final

import numpy as np

from troupellm.models.structured_outputs.backend import Backend, BackendError, BackendPlugIn, GuideError, Matcher
from troupellm.models.structured_outputs.to_lark import translate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import GuideSpec

GROUP: Final = "troupellm.guide_backends"
BITS: Final = 32
_OWN: Final = "llguidance"


def make_backend(name: str, tokenizer: Tokenizer, vocab_width: int, num_threads: int = 1) -> Backend:
    """Imports the modules it needs.

    Args:
        num_threads: for filling masks.

    Raises:
        BackendError: it is not installed, or cannot read this tokenizer.
    """
    if name != _OWN:
        return _plug_in(name)(tokenizer, masked_tokens(tokenizer, vocab_width), num_threads)
    from troupellm.models.structured_outputs.llguidance_backend import LLGuidance, vocabulary, vocabulary_marks

    try:
        tokens = vocabulary(tokenizer, masked_tokens(tokenizer, vocab_width))
        return LLGuidance(tokens, num_threads, vocabulary_marks(tokenizer, tokens))
    except ValueError as error:
        raise BackendError(f"this model's tokenizer cannot be guided: {error}") from None


def program_text(spec: GuideSpec, backend: str, depth: int, special: Mapping[str, int]) -> str:
    """The grammar of a guide in a backend's form.

    Args:
        special: `Backend.special_tokens`.

    Raises:
        GuideError: it has none.
    """
    return translate(spec, depth, special) if backend == _OWN else _plug_in(backend).program_text(spec, depth)


@cache
def _plug_in(name: str) -> BackendPlugIn:
    for point in entry_points(group=GROUP, name=name):
        found: BackendPlugIn = point.load()
        return found
    raise BackendError(f"the backend {name} is not installed; its package is troupellm-{name}, in plugins/{name}")


def masked_tokens(tokenizer: Tokenizer, vocab_width: int) -> int:
    """How many tokens masks speak of: those of the tokenizer and of the logits, and one that is never drawn, which
    stands for the end where a model has none."""
    return max(vocab_width, tokenizer.size, *(token_id + 1 for token_id in tokenizer.eos_token_ids)) + 1


def mask_words(tokenizer: Tokenizer, vocab_width: int) -> int:
    """int32 words of a mask."""
    return -(-masked_tokens(tokenizer, vocab_width) // BITS)


def check_start(backend: Backend, matcher: Matcher, words: int) -> None:
    """Raises GuideError: no token can come first.

    Args:
        words: `mask_words`.
    """
    masks = np.zeros((1, words), dtype=np.int32)
    if not matcher.stopped:
        backend.fill([matcher], masks)
    if matcher.error is not None:
        raise GuideError(matcher.error)
    if matcher.stopped or not masks.any():
        raise GuideError("no output can fit it")
