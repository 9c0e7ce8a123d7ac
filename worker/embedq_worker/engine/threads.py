"""How the threads of matrix products wait between them. Importing this module does not import torch."""

from __future__ import annotations

import os

#: 0.1 to 0.5 ms, by CPU: from one product to the next where somebody waits for a short text (sleeping threads took half
#: as long again), but not through what lies between those of large batches: with the default's milliseconds attention
#: took half as long again.
_SPINS = 10_000


def spin_briefly() -> None:
    """Let OpenMP's threads sleep soon after each product, so that our kernels' threads find their cores free.

    Read when torch is imported; later, and where the user has chosen, this changes nothing.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
