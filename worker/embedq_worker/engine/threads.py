"""How the threads of matrix products wait between them. Importing this module does not import torch."""

from __future__ import annotations

import os

#: 20 to 100 microseconds, by CPU: from one product of a small model to its next, but not through what lies between
#: those of a large one (measured on two cores: the default's milliseconds slow attention down by half).
_SPINS = 2000


def spin_briefly() -> None:
    """Let OpenMP's threads sleep soon after each product, so that our kernels' threads find their cores free.

    Read when torch is imported; later, and where the user has chosen, this changes nothing.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
