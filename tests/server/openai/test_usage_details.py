"""The draft counts of a usage object: nothing where there were no drafts."""

import msgspec

from troupellm.protocol.params.outputs import CachedTokens, Usage
from troupellm.server.openai.streaming import usage_body


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


def test_cached_tokens_are_told_by_source_where_there_are_tiers() -> None:
    plain = Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=4)
    assert "cached_tokens_by_source" not in msgspec.to_builtins(usage_body([plain]))["prompt_tokens_details"]
    sources = CachedTokens(device=16, host=32, disk=16)
    tiered = Usage(prompt_tokens=90, completion_tokens=1, cached_tokens=64, cached_sources=sources)
    told = msgspec.to_builtins(usage_body([tiered, tiered]))["prompt_tokens_details"]
    assert told["cached_tokens_by_source"] == {"device": 32, "host": 64, "disk": 32, "external": 0}
