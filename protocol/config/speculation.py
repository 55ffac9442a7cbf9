"""Speculative decoding as it is configured: vLLM's JSON keys, each checked, and what it comes down to per step.

A key of vLLM that means nothing here is refused by its name, with what to do instead; nothing is ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.errors import ConfigError

NAME: Final = "speculative_config"
MOST_DRAFTS: Final = 63
"""Drafts of a row in one step: what a node of a tree sees of the others fits 64 bits."""

Method = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "custom"]
METHODS: Final[tuple[Method, ...]] = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "custom")

_USUAL_DRAFTS: Final = 5
_ALIASES: Final[dict[str, Method]] = {
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "custom_class": "custom",
}
"""vLLM's other spellings, beside `<family>_mtp`."""
_NO_MODEL: Final = ("ngram", "suffix", "mtp", "custom")
"""Methods that read no checkpoint of their own."""
_NAMED_BY_MODEL: Final[tuple[Method, ...]] = ("draft_model", "eagle", "eagle3", "medusa")
_KEYS_OF: Final[dict[str, tuple[str, ...]]] = {
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "custom_class": ("custom",),
    "tree_widths": ("eagle", "eagle3", "medusa"),
    "draft_sample_method": ("draft_model", "eagle", "eagle3", "medusa", "mtp", "custom"),
    "quantization": ("draft_model", "eagle", "eagle3", "medusa", "mtp"),
    "max_model_len": ("draft_model", "eagle", "eagle3", "mtp"),
}
"""Which methods a key means something to; the others are for all."""
_ELSEWHERE: Final[dict[str, str]] = {
    "draft_tensor_parallel_size": "one engine drives one device; leave it out",
    "tensor_parallel_size": "one engine drives one device; leave it out",
    "disable_by_batch_size": "use num_speculative_tokens_per_batch_size",
    "disable_padded_drafter_batch": "drafts are not padded; leave it out",
    "disable_logprobs": "log-probabilities are always those of the target; leave it out",
    "speculative_token_tree": "use tree_widths, the number of nodes on each level",
    "parallel_drafting": "drafts are made one after the other; leave it out",
    "use_heterogeneous_vocab": "the draft model must have the target's tokenizer",
    "posterior_threshold": "acceptance is exact; leave it out",
    "posterior_alpha": "acceptance is exact; leave it out",
    "revision": "name a folder, or a hub id at its main revision, as model",
    "code_revision": "remote code is never run",
    "draft_load_config": "a draft model is read as the target is; leave it out",
    "enforce_eager": "use the flag --enforce-eager, which counts for both",
    "attention_backend": "use the flag --attention-backend, which counts for both",
    "moe_backend": "there is one; leave it out",
    "kv_cache_dtype": "use the flag --kv-cache-dtype, which counts for both",
    "use_local_argmax_reduction": "one engine drives one device; leave it out",
    "enable_adaptive_verification": "use adaptive",
    "dspark_draft_topk": "the method dspark is not there",
    "xpress_topc": "the method dspark is not there",
    "acceptance_method": "use rejection_sample_method",
    "synthetic_acceptance_rate": "use synthetic_acceptance_length",
    "synthetic_acceptance_rates": "use synthetic_acceptance_length",
}
"""Keys of vLLM that mean nothing here, and what to do instead."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drafted, to be verified several at a time.

    Raises:
        ConfigError: keys that contradict each other; names the key. Types and ranges are those of
            `read_speculative_config`.
    """

    method: Method | None = None
    """None: told from `model`."""
    model: str | None = None
    """Folder or hub id of a draft model, or of an EAGLE or Medusa head; None: what is shipped with the target."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFTS)] | None = None
    """Most drafts of a row in one step; for a tree its nodes."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Shortest suffix of a sequence that is looked up, in tokens."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=1024)] | None = None
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=1, le=1024)] = 24
    """Longest match together with what is drafted behind it, in tokens."""
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 10_000
    """Past outputs that are kept, of all tenants; 0 looks at the request itself only."""
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0.0, le=64.0)] = 1.0
    """Drafts per token of the match."""
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Least estimated probability of a draft."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """probabilistic draws drafts with the noise that the target draws with, so that both agree often."""
    quantization: Literal["int8", "int8-weight-only", "int4", "fp8"] | None = None
    """Of the draft model's weights."""
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    """Longest sequence that is drafted for, if the draft model's own context is not to decide."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """(first, last, drafts): of a step with first .. last sequences each has at most so many drafts. Outside of all
    ranges `num_speculative_tokens` holds."""
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    """synthetic accepts by a draw and ignores the target's tokens: for benchmarks."""
    synthetic_acceptance_length: float | None = None
    """Mean tokens of a step then, the target's own one included."""
    custom_class: str | None = None
    """`module:Class`, or a name of the entry point group troupellm.proposers."""
    adaptive: bool = True
    """Draft as many tokens as pay, by what was accepted and by what steps cost; off always drafts the most."""
    tree_widths: tuple[Annotated[int, Meta(ge=1, le=MOST_DRAFTS)], ...] = ()
    """Nodes on each level of a tree of drafts; empty drafts a chain."""

    @property
    def most_drafts(self) -> int:
        """The most drafts of a row in one step, for any proposer."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.tree_widths:
            return sum(self.tree_widths)
        if self.method == "suffix":
            return min(self.suffix_decoding_max_tree_depth, MOST_DRAFTS)
        return 1 if self.method == "mtp" else _USUAL_DRAFTS

    def most_drafts_at(self, num_rows: int) -> int:
        """The same in a step of so many rows."""
        for first, last, drafts in self.num_speculative_tokens_per_batch_size:
            if first <= num_rows <= last:
                return min(drafts, self.most_drafts)
        return self.most_drafts

    def __post_init__(self) -> None:
        _check_method(self)
        _check_pair(self)
        _check_schedule(self)
        _check_synthetic(self)
        if self.tree_widths and self.num_speculative_tokens not in (None, sum(self.tree_widths)):
            raise _error(
                "tree_widths", f"adds up to {sum(self.tree_widths)} nodes, which num_speculative_tokens must be"
            )
        if sum(self.tree_widths) > MOST_DRAFTS:
            raise _error("tree_widths", f"must add up to at most {MOST_DRAFTS} nodes, got {sum(self.tree_widths)}")


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Drafting tokens ahead."""

    speculative_config: Annotated[
        SpeculativeConfig | None,
        Meta(description="JSON object: draft tokens and verify several at once; method, num_speculative_tokens, ..."),
    ] = None


def read_speculative_config(value: Any) -> SpeculativeConfig | None:
    """From JSON text, a mapping, or what was read already; None is off.

    Raises:
        ConfigError: not an object, an unknown key, or a value of the wrong type or out of range; names the key.
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str | bytes):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{NAME} is not JSON: {error}", param=NAME) from None
        if value is None:
            return None
    if not isinstance(value, Mapping):
        raise ConfigError(f'{NAME} must be a JSON object such as {{"method": "ngram"}}', param=NAME)
    given = _understood({str(key): entry for key, entry in value.items()})
    try:
        return msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        text, _, path = with_allowed_values(error, SpeculativeConfig).partition(" - at `$.")
        raise _error(path.rstrip("`"), f"is wrong: {text}") from None


def _understood(given: dict[str, Any]) -> dict[str, Any]:
    """The given settings, in our spelling.

    Raises:
        ConfigError: a key that is unknown, or means nothing to the method.
    """
    for key in ("draft_tensor_parallel_size", "tensor_parallel_size"):
        if given.get(key) == 1:
            del given[key]
    for key in given:
        if key in _ELSEWHERE:
            raise _error(key, f"is known from vLLM but not supported here: {_ELSEWHERE[key]}")
        if key not in SpeculativeConfig.__struct_fields__:
            raise _error(key, f"is unknown; there are {', '.join(SpeculativeConfig.__struct_fields__)}")
    method = given.get("method")
    if method is None and given.get("model") in ("ngram", "[ngram]", "suffix"):  # as vLLM takes it
        method = given.pop("model")
    if isinstance(method, str):
        method = "mtp" if method.endswith("_mtp") else _ALIASES.get(method, method)
        if method not in METHODS:
            raise _error("method", f"must be one of {', '.join(METHODS)}, got {method}")
        given["method"] = method
    possible = _NAMED_BY_MODEL if method is None else (method,)
    for key, methods in _KEYS_OF.items():
        if given.get(key) is not None and not set(methods).intersection(possible):
            raise _error(key, f"means nothing to the method {'/'.join(possible)}, only to {', '.join(methods)}")
    return given


def _check_method(config: SpeculativeConfig) -> None:
    if config.method is None and config.model is None:
        raise _error("method", f"must be one of {', '.join(METHODS)}, or a model must be given")
    if config.method in _NO_MODEL and config.model is not None:
        raise _error("model", f"means nothing to the method {config.method}")
    if config.method == "custom" and not config.custom_class:
        raise _error("custom_class", "must name the proposer for the method custom")


def _check_pair(config: SpeculativeConfig) -> None:
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is not None and high is not None and low > high:
        raise _error("prompt_lookup_min", f"must be in [1, prompt_lookup_max ({high})], got {low}")


def _check_schedule(config: SpeculativeConfig) -> None:
    key, before = "num_speculative_tokens_per_batch_size", 0
    for first, last, drafts in config.num_speculative_tokens_per_batch_size:
        if not before < first <= last:
            raise _error(key, "must hold [first, last, drafts] with rising ranges that do not overlap, from 1 on")
        if not 0 <= drafts <= config.most_drafts:
            raise _error(key, f"may have 0 to {config.most_drafts} drafts (num_speculative_tokens), got {drafts}")
        before = last


def _check_synthetic(config: SpeculativeConfig) -> None:
    key, length = "synthetic_acceptance_length", config.synthetic_acceptance_length
    if (config.rejection_sample_method == "synthetic") != (length is not None):
        raise _error(key, "belongs to rejection_sample_method synthetic, and to nothing else")
    if length is not None and not 1.0 <= length <= config.most_drafts + 1:
        raise _error(key, f"must be in [1, {config.most_drafts + 1}], got {length:g}")


def _error(key: str, text: str) -> ConfigError:
    return ConfigError(f"{NAME}: {key} {text}", param=f"{NAME}.{key}")
