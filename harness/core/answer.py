"""The answer of `leakgauge claim` and `leakgauge audit`: a defense in a setting, its claim, and perhaps an audit.

`DefenseRecord` holds what was found; `Answer` is its JSON. Imports neither torch nor scipy: a repeated question is
answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from leakgauge.harness.core.labels import assumption
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, chance
from leakgauge.harness.core.stored import VERSION, to_data

_FEW = 100  # trials below which an audit shows at most an epsilon of 3 or so


@dataclass(frozen=True)
class TrialCounts:
    """What an audit by trials counted, besides `AuditRecord.trials`.

    Attributes:
        true_positives, false_positives: trials above the threshold, with input 1 and with input 0.
        needed: the trials that would show 0.9 of the proved epsilon; None: more than 10^12, or no proof.
        device: where clients trained and likelihoods were computed.
    """

    true_positives: int
    false_positives: int
    needed: int | None
    device: str
    by: Literal["trials"] = "trials"


@dataclass(frozen=True)
class MessageCounts:
    """What an audit by the messages of a training counted.

    Attributes:
        true_positives, false_positives, device: as in `TrialCounts`, of messages.
        messages: counted messages, half with each input.
        pilot: messages of the pilot, not counted.
    """

    true_positives: int
    false_positives: int
    messages: int
    pilot: int
    device: str
    by: Literal["messages"] = "messages"


@dataclass(frozen=True)
class CanaryCounts:
    """What an audit by canary clients in one run counted: all clients are canaries.

    Attributes:
        canaries: canary clients.
        guesses, right: number of guesses, and of right guesses.
    """

    canaries: int
    guesses: int
    right: int
    by: Literal["one-run"] = "one-run"


@dataclass(frozen=True)
class CosineRecord:
    """An estimate by the cosines of canary clients with the sum of what rounds decode to: no bound, no verdict.

    Attributes:
        epsilon_estimate, mu, dim, canaries: as in `one_run.CosineEstimate`.
        delta, unit: of the claim.
        rounds: rounds of the run.
        pair: the name of the pair of inputs.
        null: `known`: the cosines without a canary follow a known distribution.
    """

    epsilon_estimate: float | None
    mu: float
    dim: int
    canaries: int
    rounds: int
    delta: float
    unit: str
    pair: str = "from nothing"
    null: str = "known"
    kind: str = "estimate"
    by: Literal["cosine"] = "cosine"


@dataclass(frozen=True)
class DeltaRecord:
    """delta at `epsilon`: `exact`, for the pair that attains the proof, or by `sampling`, for the tried pair.

    low and high are the ends of the interval of delta, n is the number of samples of each input. An exact delta has
    low = high = delta and n = 0.
    """

    epsilon: float
    delta: float
    low: float
    high: float
    method: str
    n: int


@dataclass(frozen=True)
class DefenseRecord:
    """A defense in a setting, with its claim and its audit.

    Attributes:
        defense, parameters: the name of the defense, and all its parameters.
        setting: the public setting, with the number of rounds.
        claim: the claim in this setting, with its proofs.
        audit: None: not audited.
        counts: what a bound is computed from; None without a bound.
        delta_at: delta at the claimed epsilon, if it is known and the code is not contradicted.
    """

    defense: str
    parameters: dict[str, Any]
    setting: dict[str, Any]
    claim: ClaimRecord
    audit: AuditRecord | CosineRecord | None = None
    counts: TrialCounts | MessageCounts | CanaryCounts | None = None
    delta_at: DeltaRecord | None = None

    @property
    def judged(self) -> ClaimRecord | AuditRecord:
        """The record that holds verdict and reason: a bound decides besides the proof, an estimate does not."""
        return self.audit if isinstance(self.audit, AuditRecord) else self.claim

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats: a delta that protects too few, and a bound from few trials."""
        claim, notes = self.claim, list[str]()
        delta, of_records = max(claim.delta, claim.proved.delta), claim.unit == "record"
        number = self.setting["clients"] * (self.setting["samples"] if of_records else 1)
        if delta * number >= 1 and (claim.epsilon is not None or claim.proved.epsilon is not None):
            many = f"{number:,} {'records' if of_records else 'clients'}"
            notes.append(f"delta {delta:g} is not below one in {many}: publishing all about one of them satisfies it.")
        if isinstance(self.audit, AuditRecord) and self.audit.trials < _FEW:
            notes.append(f"{self.audit.trials} trials are few: under {_FEW}, a verdict says little.")
        return tuple(notes)

    def answer(self) -> Answer:
        """The record as plain data."""
        claimed = to_data(self.claim, infinity="inf") | {"adjacency": self.claim.relation}
        claimed["arithmetic"] = self.claim.arithmetic  # `to_data` leaves the first default out
        del claimed["verdict"], claimed["reason"]
        proofs = {key: claimed.pop(key) for key in ("proved", "attained", "further")}
        for row in (claimed, proofs["proved"], *proofs["further"], *filter(None, [proofs["attained"]])):
            row["chance"] = chance(float(row["epsilon"]), row["delta"])
        answer = Answer(version=VERSION, defense=self.defense)
        answer |= {"parameters": {**self.parameters}, "setting": {**self.setting}}
        answer |= {"claimed": claimed} | {key: proof for key, proof in proofs.items() if proof is not None}
        answer |= {"verdict": self.judged.verdict, "reason": self.judged.reason}
        if self.notes:
            answer["notes"] = list(self.notes)
        if self.audit is not None:
            answer["audited"] = self._audited(self.audit)
        answer.record = self
        return answer

    def _audited(self, audit: AuditRecord | CosineRecord) -> dict[str, Any]:
        row: dict[str, Any] = to_data(audit, infinity="inf") | (to_data(self.counts) or {})
        if self.delta_at is not None:
            row["delta_at"] = to_data(self.delta_at)
        if isinstance(audit, AuditRecord):
            fit = {} if audit.fit is None else {"fit": row["fit"], "detects": audit.fit.detects}
            del row["reason"], row["fit"]
            row |= {"chance": chance(audit.epsilon_lower, audit.delta), "assumes": assumption(audit.method)}
            row |= {"verdict": audit.code, "contradicts": row["contradictions"]} | fit
        return row


class Answer(dict[str, Any]):
    """The plain data of a `DefenseRecord`, as `leakgauge claim --json` and `leakgauge audit --json` print them.

    The keys are the names of the fields of the records, with these differences:

    | key | value |
    |---|---|
    | version | the version of the form, as in stored files |
    | claimed | the `ClaimRecord`; `adjacency` is its relation |
    | proved, attained, further | the proofs of the claim; `attained` only if it is known |
    | notes | caveats, one sentence each; missing if there are none |
    | verdict, reason | of the audit if it shows a bound, else of the claim |
    | audited | the `AuditRecord` and its counts, or the `CosineRecord`; missing if there is no audit |
    | audited: verdict, contradicts | `AuditRecord.code` and `contradictions`, the verdict on the code |
    | audited: assumes | what the bound assumes: nothing, or the distribution's family |
    | audited: keys | the `KeyRecord` |
    | audited: fit, detects | the `FitRecord`, and its `detects`; missing if no distribution is stated |
    | audited: delta_at | the `DeltaRecord`; missing if it is not known |
    | chance | beside each epsilon: the probability that an adversary guesses one bit right, `core.result.chance` |

    An infinite epsilon is the text "inf".

    Attributes:
        record: the record itself.
    """

    record: DefenseRecord
