"""The counts of a request's draft tokens, as every API's usage has them."""

from collections.abc import Sequence

from troupellm.protocol.params.outputs import Usage


def predictions(usages: Sequence[Usage]) -> dict[str, int]:
    """Fields of `PredictionDetails`; none where nothing was drafted."""
    drafted = sum(usage.draft_tokens for usage in usages)
    if not drafted:
        return {}
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
        "prediction_steps": sum(usage.draft_steps for usage in usages),
    }
