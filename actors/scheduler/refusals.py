"""Finds requests that can never run, even when all others have ended. A request that can run later waits instead."""

from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest, context_sentence
from troupellm.protocol.messages.cache_groups import capacity_tokens, count_beam_blocks
from troupellm.protocol.messages.scheduler import BeamSettings, SubmitRequest
from troupellm.protocol.messages.worker import WorkerReady


def find_refusal(message: SubmitRequest, ready: WorkerReady, config: SchedulerConfig) -> InvalidRequest | None:
    """Why a request is refused; None lets it in."""
    num_prompt = len(message.prompt) // 4
    if not num_prompt:
        return InvalidRequest("the prompt has no tokens", param="prompt")
    if message.max_tokens < 1:
        return InvalidRequest(f"max_tokens must be at least 1, got {message.max_tokens}", param="max_tokens")
    room = ready.max_model_len
    if message.pooling is not None:
        return _pooling_refusal(num_prompt, ready, config)
    if num_prompt >= room:
        return ContextLengthExceeded(
            f"{context_sentence(room)} However, the prompt has {num_prompt} tokens, which leave no room for an answer.",
            limit=room,
            got=num_prompt,
        )
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and num_prompt > budget:
        return ContextLengthExceeded(
            f"{context_sentence(budget, 'a step takes no more, and chunked prefill is off')}"
            f" However, the prompt has {num_prompt} tokens.",
            limit=budget,
            got=num_prompt,
        )
    wanted = min(num_prompt + message.max_tokens, room) - 1  # the last token is never computed
    capacity = capacity_tokens(ready, config.max_num_batched_tokens)
    if wanted > capacity:
        return ContextLengthExceeded(
            f"{context_sentence(capacity, 'the KV cache holds no more')}"
            f" However, prompt and max_tokens need {wanted} tokens.",
            limit=capacity,
            got=wanted,
            answer_tokens=max(0, wanted - num_prompt),
        )
    return None if message.beam is None else _beam_refusal(message, message.beam, ready, config, wanted)


def _pooling_refusal(num_prompt: int, ready: WorkerReady, config: SchedulerConfig) -> InvalidRequest | None:
    """Only the prompt is computed, but for some models at once."""
    limits = [ready.max_model_len, capacity_tokens(ready, config.max_num_batched_tokens)]
    if ready.whole_prompts or not config.enable_chunked_prefill:
        limits.append(config.max_num_batched_tokens)
    limit = min(limits)
    if num_prompt <= limit:
        return None
    return ContextLengthExceeded(
        f"{context_sentence(limit)} However, the prompt has {num_prompt} tokens; no more can be pooled.",
        limit=limit,
        got=num_prompt,
    )


def _beam_refusal(
    message: SubmitRequest, beam: BeamSettings, ready: WorkerReady, config: SchedulerConfig, wanted: int
) -> InvalidRequest | None:
    """Beams advance together, so all of them must fit at once; the prompt's full blocks they share."""
    width = len(message.sequences)
    if width > config.max_num_seqs:
        return InvalidRequest(
            f"n must be at most max_num_seqs ({config.max_num_seqs}) with use_beam_search, got {width}", param="n"
        )
    if beam.num_candidates > ready.vocab_width:
        return InvalidRequest(
            f"n is too large for use_beam_search: a step would look at {beam.num_candidates} tokens of"
            f" {ready.vocab_width}",
            param="n",
        )
    if beam.num_candidates < width + len(message.stop_token_ids | message.eos_token_ids):
        return InvalidRequest("too many tokens end a sequence for use_beam_search", param="stop_token_ids")
    size, groups = ready.block_size, len(ready.groups)
    blocks = count_beam_blocks(groups, len(message.prompt) // 4, wanted, width, size)
    if blocks > ready.num_blocks:
        needed, whole = blocks * size // groups, ready.num_blocks * size // groups
        return ContextLengthExceeded(
            f"{context_sentence(whole // width, f'with {width} beams')}"
            f" However, {width} beams need {needed} tokens of KV cache; the whole cache has {whole}.",
            limit=whole,
            got=needed,
            param="n",
        )
    return None
