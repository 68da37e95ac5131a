"""Fingerprints of the code's output for given keys: they show which part differs between two versions of the code.

| part | of | compared |
|---|---|---|
| `encode` | messages of the rounds of a training, of updates of lengths 0.1 to 400, dense and sparse | byte by byte |
| `estimate` | these messages, decoded | to 0.1 % |
| `likelihood` | the true updates, and shorter ones | to 0.1 % |
| `claim` | two rounds | to six digits |
| `training` | one round of the federation with the defense | to 0.1 % |
| `attack` | scores on at most two victims at fresh parameters, with few evaluations | to 1 % |

Clients train and attacks search in double precision: in single precision, a search may end elsewhere after a change of
rounding. Keys are those of a training with the cell's seed, so a defense cannot tell the two apart by its keys.
If a private draw changes, for example because a key is renamed, `encode` changes although the mechanism stays the same.
So each defense also has draws: statistics of messages, by which `gate.mechanism` compares two versions of the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STATISTICS = ("the share of the update that is transmitted", "the noise's energy", "the median of the squared noise")
"""Statistics of a message; the last two are logarithms."""

ROUNDS = ("the first", "the second", "the last")
COLUMNS = len(ROUNDS) * len(STATISTICS)
"""Numbers of a message: the statistics in each of these rounds; zeros for a round that there is not."""

DRAWS = 12
"""Number of messages behind each statistic."""

DRAWN = ("messages", "messages after training")
"""`Fingerprint.what` of statistics: of messages of fixed updates, and of messages after local training."""


@dataclass(frozen=True)
class Fingerprint:
    """The output of one part of the code for fixed keys: a digest of exact content, and numbers that may be rounded.

    Attributes:
        what: a row of the table of this module, or one of `DRAWN`.
        defense, attack: keys of the parts (`PartSpec.key`); `attack` is empty unless `what` is `attack`.
        case: fingerprint of the task and the federation, and for an attack also of adversary and target.
    """

    what: str
    defense: str
    attack: str
    case: str
    digest: str = ""
    numbers: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The part and the case that the fingerprint belongs to."""
        return self.what, self.defense, self.attack, self.case

    def like(self, other: Fingerprint) -> bool:
        """Whether two versions of the code give the same, up to rounding; the tolerance is wider for an attack."""
        tolerance = 1e-2 if self.what == "attack" else 1e-3
        same = (self.digest, len(self.numbers)) == (other.digest, len(other.numbers))
        pairs = zip(self.numbers, other.numbers, strict=False)
        return same and all(math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6) for a, b in pairs)
