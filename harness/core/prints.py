"""Fingerprints of what the code makes of fixed keys: they tell which part changed, in seconds and without a run.

| part | of | compared |
|---|---|---|
| `encode` | two rounds of messages of four updates of lengths 0.1 to 400, so that every clip acts | byte by byte |
| `estimate` | what these messages decode to | to 0.1 % |
| `likelihood` | of the true updates, and of shorter ones | to 0.1 % |
| `claim` | for two rounds | to six digits |
| `training` | one round of the federation with the defense | to 0.1 % |
| `attack` | its scores on at most two victims at fresh parameters, with few evaluations | to 1 % |

A private draw that changes, as when a key is renamed, changes `encode` and not the mechanism. So each defense also has
draws: statistics of messages, by which `gate.prints` compares two versions of the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STATISTICS = ("the share of the update that comes through", "the noise's energy", "the median of the squared noise")
"""Of a message, in each of two rounds; the last two as logarithms."""

DRAWS = 12
"""Messages behind each statistic."""

DRAWN = ("messages", "messages after training")
"""`Print.what` of statistics: of messages of fixed updates, and of clients that train by a defense's rule."""


@dataclass(frozen=True)
class Print:
    """What one part of the code makes of fixed keys: a digest of exact content, and numbers that may be rounded.

    Attributes:
        what: a row of the table of this module, or one of `DRAWN`.
        defense, attack: keys of the parts (`PartSpec.key`); no attack but for `attack`.
        case: fingerprint of the task, the federation and, of an attack, adversary and target.
    """

    what: str
    defense: str
    attack: str
    case: str
    digest: str = ""
    numbers: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is a print of."""
        return self.what, self.defense, self.attack, self.case

    def like(self, other: Print) -> bool:
        """Whether two versions of the code make the same, up to rounding, which a search carries further."""
        tolerance = 1e-2 if self.what == "attack" else 1e-3
        same = (self.digest, len(self.numbers)) == (other.digest, len(other.numbers))
        pairs = zip(self.numbers, other.numbers, strict=False)
        return same and all(math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6) for a, b in pairs)
