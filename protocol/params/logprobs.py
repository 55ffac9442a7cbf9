"""The number that is reported as a token's log-probability."""

from typing import Literal

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""Of the model's own scores, or of what is drawn from after all that a request changes; normalised, or as logits."""
