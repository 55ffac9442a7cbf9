"""All planted faults, room by room."""

from typing import Final

from tests.mutants import actors, kernels, models, protocol, server
from tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = (
    *protocol.MUTANTS,
    *kernels.MUTANTS,
    *models.MUTANTS,
    *actors.MUTANTS,
    *server.MUTANTS,
)
