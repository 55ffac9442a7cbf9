"""What a usage object says of drafts: nothing where there were none."""

import msgspec

from troupellm.protocol.outputs import Usage
from troupellm.server.streaming import usage_body


def test_drafts_are_told_where_there_were_any() -> None:
    plain = Usage(prompt_tokens=3, completion_tokens=8)
    drafted = Usage(prompt_tokens=3, completion_tokens=9, draft_steps=4, draft_tokens=12, accepted_draft_tokens=5)
    told = msgspec.to_builtins(usage_body([plain, drafted]))["completion_tokens_details"]
    assert told == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 7,
        "prediction_steps": 4,
    }
    assert msgspec.to_builtins(usage_body([plain]))["completion_tokens_details"] == {"reasoning_tokens": 0}
