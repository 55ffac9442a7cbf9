"""The backends by name, and the check that a grammar can begin."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

import numpy as np

from troupellm.models.structured_outputs.backend import Backend, BackendError, GuideError, Matcher
from troupellm.models.structured_outputs.to_lark import translate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import GuideSpec

BITS: Final = 32


def make_backend(name: str, tokenizer: Tokenizer, vocab_width: int, num_threads: int = 1) -> Backend:
    """Imports the modules it needs.

    Args:
        num_threads: for filling masks.

    Raises:
        BackendError: it is not installed, or cannot read this tokenizer.
    """
    if name == "xgrammar":
        if find_spec("xgrammar") is None:
            raise BackendError("the backend xgrammar is not installed")
        from troupellm.models.structured_outputs.xgrammar_backend import XGrammar

        return XGrammar(tokenizer, masked_tokens(tokenizer, vocab_width), num_threads)
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
    if backend == "xgrammar":
        from troupellm.models.structured_outputs.xgrammar_backend import xgrammar_text

        return xgrammar_text(spec, depth)
    return translate(spec, depth, special)


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
