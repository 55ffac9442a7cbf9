"""The backends by name, and the check that a grammar can begin."""

from typing import Final

import numpy as np

from troupellm.models.guides.backend import Backend, GuideError, Matcher
from troupellm.models.guides.translate import translate
from troupellm.models.tokenizer import Tokenizer
from troupellm.protocol.guide import GuideSpec

BITS: Final = 32


def make_backend(name: str, tokenizer: Tokenizer, vocab_width: int, num_threads: int = 1) -> Backend:
    """Imports what it needs.

    Args:
        num_threads: for filling masks.

    Raises:
        GuideError: the backend is not installed, or cannot read this tokenizer.
    """
    if name == "xgrammar":
        from troupellm.models.guides.xgrammar_backend import XGrammar

        return XGrammar(tokenizer, vocab_width, num_threads)
    from troupellm.models.guides.llguidance_backend import LLGuidance, vocabulary

    try:
        return LLGuidance(vocabulary(tokenizer, vocab_width), num_threads)
    except ValueError as error:
        raise GuideError(f"this model's tokenizer cannot be guided: {error}") from None


def program_text(spec: GuideSpec, backend: str, depth: int) -> str:
    """The grammar of a guide in a backend's form.

    Raises:
        GuideError: it has none.
    """
    if backend == "xgrammar":
        from troupellm.models.guides.xgrammar_backend import xgrammar_text

        return xgrammar_text(spec, depth)
    return translate(spec, depth)


def mask_words(vocab_width: int) -> int:
    """int32 words of a mask. One more than the logits need is harmless: what lies behind them is cut off."""
    return -(-(vocab_width + 1) // BITS)


def check_start(backend: Backend, matcher: Matcher, vocab_width: int) -> None:
    """Raises GuideError: no token can come first."""
    masks = np.zeros((1, mask_words(vocab_width)), dtype=np.int32)
    if not matcher.stopped:
        backend.fill([matcher], masks)
    if matcher.error is not None:
        raise GuideError(matcher.error)
    if matcher.stopped or not masks.any():
        raise GuideError("no output can fit it")
