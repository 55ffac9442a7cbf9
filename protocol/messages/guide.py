"""Messages to the guide actor."""

import msgspec

from troupellm.protocol.messages.output import OpenRequest
from troupellm.protocol.messages.scheduler import AbortRequest, SubmitRequest
from troupellm.protocol.params.guide import GuideProgram, GuideSpec


class GuideRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passed validation, on its way to the output actor and the scheduler, but for its guide."""

    spec: GuideSpec
    opened: OpenRequest
    submitted: SubmitRequest


class BuildGuide(msgspec.Struct, frozen=True):
    """From the scheduler: have the worker build a program beside its steps; answered by `GuideBuilt`."""

    program: GuideProgram
    tenant: str
    """Whose turn the build takes."""
    engine_epoch: int = 0


GuideMessage = GuideRequest
GuideControl = AbortRequest | BuildGuide
