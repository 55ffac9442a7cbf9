"""All planted faults, room by room."""

from typing import Final

from troupellm.tests.mutants import actors, kernels, models, protocol, server
from troupellm.tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = (
    *protocol.MUTANTS,
    *kernels.MUTANTS,
    *models.MUTANTS,
    *actors.MUTANTS,
    *server.MUTANTS,
)
