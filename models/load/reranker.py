"""Rerankers that are decoders: the score of a pair is how much likelier than no the answer yes is (Qwen3-Reranker).

Such a checkpoint is known by its published name, by sentence-transformers' module LogitScore of these two tokens, or
by the setting `pooler_config` with `score_tokens`. Zhang and others, Qwen3 Embedding, 2025, section 2.
"""

from pathlib import Path

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.pooling_config import MODULES, PoolerOverrides, logit_score_tokens
from troupellm.models.tokenizer.served import load_tokenizer
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

PUBLISHED, ANSWERS = "qwen3-reranker", ("yes", "no")


def settle_score(folder: Path, model: DecoderConfig, config: ModelConfig, progress: ProgressSink) -> DecoderConfig:
    """The description, with a score in the place of the head if the checkpoint is such a reranker.

    Raises:
        ModelLoadError: its answers are other ones than yes and no, or no single tokens.
        ConfigError: `score_tokens` are no single tokens.
    """
    if model.head != "lm" or config.runner == "generate" or config.convert not in ("auto", "classify"):
        return model
    given, stored = PoolerOverrides.read(config.pooler_config).score_tokens, logit_score_tokens(folder)
    published = PUBLISHED in (config.model or "").lower() and not (folder / MODULES).is_file()
    if given is None and stored is None and not published:
        return model
    tokenizer, wanted = load_tokenizer(folder, config), given or ANSWERS
    numbers = _number(tokenizer, wanted[0]), _number(tokenizer, wanted[1])
    if numbers[0] is None or numbers[1] is None:
        text = f"{' and '.join(wanted)} must be single tokens of the tokenizer"
        raise (
            ConfigError(f"pooler_config: score_tokens: {text}", param="pooler_config")
            if given
            else ModelLoadError(text)
        )
    if stored is not None and given is None and stored != numbers:
        raise ModelLoadError(
            f"{MODULES}: LogitScore of the tokens {stored[0]} and {stored[1]} is not supported",
            hint=f"supported are the tokens {' and '.join(ANSWERS)}: {numbers[0]} and {numbers[1]}",
        )
    note = f"a reranker: pairs are scored by the logits of {wanted[0]!r} and {wanted[1]!r}; it writes no text"
    progress(LoadProgress(phase="resolve", detail=note))
    return msgspec.structs.replace(model, head="score", num_labels=1, score_tokens=(numbers[0], numbers[1]))


def _number(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a text that is one token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
