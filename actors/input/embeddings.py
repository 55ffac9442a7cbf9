"""Checks of a prompt of input embeddings."""

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import EmbedsPrompt
from troupellm.protocol.params.sampling import SamplingParams

MAX_EMBEDDING_BYTES = 40 * 2**20
"""Of one prompt: the plan that introduces it is one message to the worker."""
_FIELD = "prompt_embeds"


def check_embeddings(prompt: EmbedsPrompt, hidden_size: int, params: SamplingParams) -> None:
    """
    Args:
        hidden_size: numbers of an input embedding; 0 if the model takes none.

    Raises:
        InvalidRequest: the embeddings are too many or too wide, the model takes none, or an option needs tokens.
    """
    if not hidden_size:
        raise InvalidRequest("this model takes no prompt_embeds: its layers also read the ids of tokens", param=_FIELD)
    if len(prompt.embeddings) > MAX_EMBEDDING_BYTES:
        raise InvalidRequest(f"prompt_embeds must be at most {MAX_EMBEDDING_BYTES} bytes as float32", param=_FIELD)
    if len(prompt.embeddings) != 4 * prompt.num_tokens * hidden_size:
        raise InvalidRequest(f"prompt_embeds must have {hidden_size} numbers for each of its tokens", param=_FIELD)
    if params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs needs a prompt of tokens", param="prompt_logprobs")
    if params.use_beam_search:
        raise InvalidRequest("use_beam_search needs a prompt of tokens", param="use_beam_search")
