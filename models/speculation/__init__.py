"""Speculative decoding: proposers guess a row's next tokens, the model computes them all in one step and keeps those
that it would have written itself. See `proposer` for what a proposer is and `speculator` for what becomes of its
drafts."""
