"""The threat models: one table of what each adversary sees."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass


class Threat(enum.Enum):
    """A kind of adversary; `SEES` lists what it sees."""

    SERVER = "server"
    COLLUDING_SERVER = "colluding-server"
    MALICIOUS_SERVER = "malicious-server"
    AGGREGATOR = "aggregator"
    EAVESDROPPER = "eavesdropper"
    PARTICIPANT = "participant"
    PUBLIC = "public"


# Known to every adversary: the model's architecture, the federation's settings, the defense with its parameters and
# state (Kerckhoffs), data of the same kind that belong to no victim, and the records whose membership is in question
_PUBLIC = frozenset({"task", "setting", "defense", "auxiliary", "candidates"})

SEES: dict[Threat, frozenset[str]] = {
    Threat.SERVER: _PUBLIC | {"messages", "shared", "models", "final"},  # honest but curious; must decode
    Threat.COLLUDING_SERVER: _PUBLIC | {"messages", "shared", "models", "final", "others"},  # with all non-victims
    Threat.MALICIOUS_SERVER: _PUBLIC | {"messages", "shared", "models", "final", "broadcast"},  # chooses the models
    Threat.AGGREGATOR: _PUBLIC | {"sums", "models", "final"},  # behind secure aggregation: never a single message
    Threat.EAVESDROPPER: _PUBLIC | {"messages", "models", "final"},  # uplink and broadcast, but no shared key
    Threat.PARTICIPANT: _PUBLIC | {"models", "final"},  # the model of every round, never a message
    Threat.PUBLIC: _PUBLIC | {"final"},  # the final model
}
"""What each adversary sees, without grants. `sums`: for each round, the sum of its decoded messages.

`broadcast`: the adversary chooses the parameters of the attacked rounds.
"""

ADVERSARIES = {
    "server": "a server that keeps all messages",
    "colluding-server": "a server with colluding clients",
    "malicious-server": "a server that changes the model",
    "aggregator": "a server that sees only sums",
    "eavesdropper": "an eavesdropper on the wire",
    "participant": "another client",
    "public": "someone with the final model",
}
"""Each adversary in a few words."""

LISTED = frozenset({"messages", "shared", "sums", "models", "final", "others", "broadcast"})
"""What the adversaries of a claim against `ANYBODY` may see, besides what is known to every adversary."""


def seeing(most: Collection[str], *, some: Collection[str] = ()) -> frozenset[Threat]:
    """The adversaries who see nothing but `most` and what every adversary knows, and of `some` at least one.

    A claim names its adversaries by what they see, never by the others: a threat that is added later and sees more
    is then not among them.
    """
    allowed = _PUBLIC.union(most)
    return frozenset(threat for threat, sees in SEES.items() if sees <= allowed and (not some or sees & {*some}))


ANYBODY = seeing(LISTED)

EAVESDROPPERS = seeing(LISTED - {"shared"}, some={"messages"})
"""Hear messages without the server's keys, with a receiver of their own."""

GRANTS = frozenset({"labels", "broadcast", "craft", "lineup", "mates"})
"""Side knowledge or powers that a study grants to an adversary by name, as in `server+labels`.

`craft`: the adversary is the last client, and chooses its update, or the bytes that it sends, in the round before the
attacked ones. `lineup`: for each record behind a message, candidates of the same label, one of which is the record.
`mates`: all other records of the message; then only its first record is in question.
"""

POWERS = frozenset({"broadcast", "craft"})
"""The grants that change what is trained, and so make another adversary."""

# A grant that names the data set of the (unlabeled) auxiliary data, as in `server+auxiliary=fashion_mnist`
_OTHER = "auxiliary="


class ThreatMismatch(ValueError):
    """An attack needs something that its adversary does not see."""


@dataclass(frozen=True)
class View:
    """An adversary: a threat model and the side knowledge that the study grants; written `server+labels`.

    other: the data set of its auxiliary data; empty: the auxiliary data are of the victims' kind.
    """

    threat: Threat
    grants: frozenset[str] = frozenset()
    other: str = ""

    @classmethod
    def parse(cls, text: str) -> View:
        """The view that `text` names.

        Raises:
            ValueError: an unknown threat or grant; the message lists the known ones.
        """
        name, *grants = text.split("+")
        others = [grant.removeprefix(_OTHER) for grant in grants if grant.startswith(_OTHER)]
        grants = [grant for grant in grants if not grant.startswith(_OTHER)]
        known = [threat.value for threat in Threat]
        if name not in known:
            raise ValueError(f"no threat {name!r}; known: {', '.join(known)}")
        for grant in grants:
            if grant not in GRANTS:
                raise ValueError(f"no grant {grant!r} in {text!r}; known: {', '.join(sorted(GRANTS))}, {_OTHER}DATA")
        if len(others) > 1 or "" in others:
            raise ValueError(f"expected one data set after {_OTHER!r} in {text!r}, got {others}")
        return cls(Threat(name), frozenset(grants), *others)

    @property
    def sees(self) -> frozenset[str]:
        """Names of everything that this adversary sees."""
        return SEES[self.threat] | self.grants

    @property
    def messages(self) -> bool:
        """Whether it sees messages of the attacked rounds, or at least their sum."""
        return bool(self.sees & {"messages", "sums"})

    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        other = [_OTHER + self.other] if self.other else []
        return "+".join([self.threat.value, *sorted(self.grants), *other])


def require(needs: frozenset[str], attack: str, view: View) -> None:
    """Check that the adversary sees what an attack needs.

    Raises:
        ThreatMismatch: something is missing; the error lists what is missing and what the adversary sees.
    """
    sees = view.sees | ({"messages"} if view.messages else set())
    missing = sorted(needs - sees)
    if missing:
        is_server = missing == ["broadcast"] and "messages" in view.sees
        given = "malicious-server" if is_server else f"{view.name}+{missing[0]}"
        hint = f"; grant it with threat {given}" if missing[0] in GRANTS else ""
        raise ThreatMismatch(
            f"attack {attack!r} needs {', '.join(map(repr, missing))}, which {view.name!r} does not see; "
            f"it sees: {', '.join(sorted(view.sees))}{hint}"
        )
