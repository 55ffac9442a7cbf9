"""What the guide actor is told."""

import msgspec

from troupellm.protocol.guide import GuideSpec
from troupellm.protocol.output import OpenRequest
from troupellm.protocol.scheduler import AbortRequest, SubmitRequest


class GuideRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passed validation, on its way to the output actor and the scheduler, but for its guide."""

    spec: GuideSpec
    opened: OpenRequest
    submitted: SubmitRequest


GuideMessage = GuideRequest
GuideControl = AbortRequest
