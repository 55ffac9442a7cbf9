"""Logits processors that tests install."""

import torch

from troupellm import LogitsProcessor

MODULE = __name__
"""For settings that name classes of this module."""


class OnlyToken(LogitsProcessor):
    """Allows one token, once `after` tokens were generated."""

    arguments = ("token",)

    def prepare(self, arguments):
        token = arguments.get("token")
        if type(token) is not int or not 0 <= token < self.vocab_width:
            raise ValueError("token must be a token id")
        return token, arguments.get("after", 0)

    def apply(self, logits, rows):
        for place, row in enumerate(rows):
            token, after = row.options
            if row.tokens.numel() - row.num_prompt_tokens >= after:
                kept = logits[place, token].item()
                logits[place] = -torch.inf
                logits[place, token] = kept
        return logits


class Broken(LogitsProcessor):
    def apply(self, logits, rows):
        for place, row in enumerate(rows):
            match row.options.get("how"):
                case "raise":
                    raise RuntimeError("/secret/path in an error")
                case "shape":
                    return logits[:, 1:]
                case "nan":
                    logits[place] = torch.nan
                case "all":
                    logits[place] = -torch.inf
        return logits


class NoPlugIn:
    def __init__(self, vocab_width, device):
        pass
