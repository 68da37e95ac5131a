"""For which numbers proofs hold: labels are true on the bytes, and low bits that tell updates apart are found."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Arithmetic, Defense, Key, Sender, rng
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.ppr import _Points
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.audit import standalone
from leakgauge.harness.audit.claims import claim_to_data, record_claim
from leakgauge.harness.audit.keys import check_keys
from leakgauge.harness.audit.low_bits import low_bits
from leakgauge.harness.core.claim import Proof, Unit, claim_over
from leakgauge.harness.core.codec import BitReader, pack_levels, unpack_float32, unpack_levels, width_of
from leakgauge.harness.core.contract import claim_of
from leakgauge.harness.core.labels import ARITHMETIC
from leakgauge.harness.core.result import ClaimRecord
from leakgauge.harness.core.stored import from_data, to_data
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client
from leakgauge.harness.federation.small import Federation
from leakgauge.reports.sections.claims import SECTION, claims
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.audit_case import at_most, setting_of
from tests.by_rows import by_rows
from tests.command import call
from tests.faults.library import lying, made
from tests.test_keys import LIKE, NAMES, bits_of_signs

PAGE = (Path(__file__).parents[1] / "docs" / "claims-tables.md").read_text("utf-8")
SCALES = ("public", "tensor", "vector")
DIM = 13
LARGEST = 2**20
"""The most values of one number: far fewer than floats, of which a message holds 2^32."""


def arithmetic(name, **given):
    return registry.build("defense", name, given).arithmetic.value


# what is said


def test_every_value_has_a_sentence_and_no_shipped_defense_is_exact():
    assert {one.value for one in Arithmetic} == {*ARITHMETIC}
    assert {arithmetic(name) for name in NAMES} == {"rounding-safe", "reals"}


def test_the_page_has_the_value_of_each_defense():
    rows = re.findall(r"^\| (`[^|]*`) \| `(rounding-safe|reals|exact)` \|", PAGE, re.MULTILINE)
    said = {name: value for names, value in rows for name in re.findall(r"`([^`]+)`", names)}
    assert said == {name: arithmetic(name) for name in NAMES}


@pytest.mark.parametrize("name", ["mvu", "jopeq", "jopeq-t", "laplace+sdq", "t-noise+sdq", "t-noise+sdq-lattice"])
def test_a_norm_in_the_clear_is_a_float(name):
    assert [arithmetic(name, scale=scale) for scale in SCALES] == ["rounding-safe", "reals", "reals"]


def test_a_group_of_clients_has_that_of_its_defense():
    assert arithmetic("mvu", personal="epsilon = 1, 2") == "rounding-safe"
    assert arithmetic("laplace", personal="epsilon = 1, 2") == "reals"


def test_a_defense_that_says_nothing_is_for_real_numbers():
    assert Defense.arithmetic is Arithmetic.REALS
    assert claim_over(1, 1.0, Proof.pure(1.0, 1, Unit.MESSAGE, ""), source="").arithmetic is Arithmetic.REALS


def test_a_record_says_it_and_an_older_one_is_read_as_reals():
    claims = [claim_of(d, (f := Federation.of(d, LIKE)).history, f.setting) for d in (made("mvu"), made("laplace"))]
    records = [record_claim(claim) for claim in claims]
    assert [record.arithmetic for record in records] == ["rounding-safe", "reals"]
    stored = [to_data(record) for record in records]
    assert ["arithmetic" in data for data in stored] == [True, False]  # as older versions wrote it
    assert [from_data(ClaimRecord, data) for data in stored] == records
    assert claim_to_data(claims[0]) != claim_to_data(dataclasses.replace(claims[0], arithmetic=Arithmetic.REALS))


@by_rows(("mvu", "rounding-safe"), ("gaussian", "reals"))
def test_the_command_and_its_json_say_it(name, value):
    assert f"\n  numbers  {value}: {ARITHMETIC[value]}\n" in call("claim", name).output
    assert json.loads(call("claim", name, "--json").output)["claimed"]["arithmetic"] == value


def test_nothing_is_said_where_nothing_is_promised():
    assert "numbers" not in call("claim", "none").output


def test_report_and_exports_say_it():
    run, trainings = double.checked_run(), {}
    for key, one in run.trainings.items():
        value = "rounding-safe" if one.spec.defense.name == "gaussian" else "reals"
        both = {name: dataclasses.replace(getattr(one, name), arithmetic=value) for name in ("one_round", "whole_run")}
        trainings[key] = dataclasses.replace(one, **both)
    run = dataclasses.replace(run, trainings=trainings)
    for row in claims(Analysis(run))["rows"]:
        value = "rounding-safe" if row["defense"].name == "gaussian" else "reals"
        promises = any(line.claimed.finite for line in row["lines"])
        assert row["numbers"] == (value if promises else "")
        assert (f"Numbers: {value}, {ARITHMETIC[value]}." in row["basis"]) == promises
    table = SECTION.tables(Analysis(run))[0]
    assert {"reals", "rounding-safe"} <= {row[table.columns.index("Numbers")] for row in table.rows}
    frame = run.frame()
    stated = {one.spec.id: one.one_round.arithmetic for one in trainings.values()}
    proved = frame[frame.quantity.isin(["claimed_epsilon", "proved_epsilon"])]
    assert [stated[key] for key in proved.training] == [*proved.arithmetic]
    assert {*frame[frame.quantity == "final_accuracy"].arithmetic} == {""}


# rounding-safe, on the bytes


def packed(count, width, values):
    """A reader of packed numbers below `values`, which also refuses bytes that such numbers do not give."""

    def read(wire, shared):
        numbers = unpack_levels(wire, count, width)
        assert pack_levels(numbers, width) == wire
        assert values <= LARGEST
        assert numbers.max(initial=0) < values
        return set(numbers.tolist())

    return read


def of_lattice(lattice, count=DIM):
    return packed(-(-count // lattice.dimension) * lattice.dimension, width_of(lattice.levels), lattice.levels)


def of_points(wire, shared):
    """The number of a point that the shared key alone fixes."""
    reader = BitReader(wire)
    stretch = reader.take_number(6)
    count = _Points(shared, DIM).count(stretch)
    number = reader.take_number(width_of(count))
    reader.done()
    assert number < count
    return {(stretch, number)}


SIZE = 1 << (DIM - 1).bit_length()
READERS = {
    "mvu": lambda d: packed(DIM, d.bits, 2**d.bits),
    "rqm": lambda d: packed(DIM, d.width, d.levels),
    "vqsgd": lambda d: packed(d.repeats, width_of(2 * DIM), 2 * DIM),
    "sqsgd": lambda d: packed(d.sent(DIM), d.bits, 2**d.bits),
    "ppr": lambda d: of_points,
    **dict.fromkeys(("skellam", "distributed-gaussian", "poisson-binomial"), lambda d: packed(SIZE, d.bits, 2**d.bits)),
    **dict.fromkeys(("jopeq", "jopeq-t", "jopeq-sound"), lambda d: of_lattice(d.lattice)),
}
"""What a message may hold, from parameters alone."""


def reader_of(name, defense):
    if "+" in name:
        setting = setting_of(DIM)
        return of_lattice(defense._lattice(setting), defense.first.scaling.count(setting.layout))
    return READERS[name](defense)


SAFE = [
    (name, given)
    for name in NAMES
    for given in ({}, *({"scale": scale} for scale in SCALES))
    if not given or "scale" in (registry.defaults("defense", name) if "+" not in name else made(name).parameters())
    if made(name, **given).arithmetic is not Arithmetic.REALS
]

FINE = torch.linspace(0.1, 1.0, DIM) * 0.0123456789
UPDATES = (torch.zeros(DIM), FINE, 1e-20 * FINE, 1e20 * FINE.flip(0), torch.ones(DIM))


def sent(defense, update, shared, number, setting):
    """A message as it leaves the client, and what a sum of two is, for a secure sum."""
    federation = Federation.of(defense, setting)
    round_, private = federation.round(), Key(number, ("private",))
    client = Client(Sender(0, 20), update, defense.remember(setting), private, shared)
    exchange = round_.exchange([client], private.child("channel"))
    return [*exchange.sent, *(exchange.received if defense.superposes else ())]


@by_rows(*SAFE)
def test_rounding_safe_messages_hold_numbers_of_a_small_set_whatever_the_update_is(name, given):
    defense = made(name, **given)
    read, shared, setting = reader_of(name, defense), Key(5, ("shared",)), setting_of(DIM)
    each = [sent(defense, update, shared, n, setting) for update in UPDATES for n in range(12)]
    wires = [wire for both in each for wire in both]
    assert all(read(wire, shared) for wire in wires)
    if name != "ppr":  # whose numbers have as many bits as there are points in a stretch of time
        assert len({len(wire) for wire in wires}) == 1


@by_rows(("mvu", {"epsilon": 1.0}), ("rqm", {"levels": 3, "epsilon": 1.0}), ("jopeq-sound", {"epsilon": 0.5}))
def test_two_updates_have_the_same_numbers_of_few(name, given):
    defense, shared, setting = made(name, **given), Key(5, ("shared",)), setting_of(DIM)
    read = reader_of(name, defense)
    seen = [
        set.union(*(read(wire, shared) for n in range(60) for wire in sent(defense, update, shared, n, setting)))
        for update in (FINE, -torch.ones(DIM))
    ]
    assert seen[0] == seen[1]
    assert 2 <= len(seen[0]) <= 3


@dataclasses.dataclass(frozen=True)
class CalledSafe(Gaussian):
    """Says that it sends no floats."""

    arithmetic = Arithmetic.ROUNDING_SAFE


def test_a_false_label_is_seen_on_the_bytes_and_contradicted():
    wire = sent(CalledSafe(), FINE, Key(5, ("shared",)), 0, setting_of(DIM))[0]
    for width in (8, 16):
        with pytest.raises((AssertionError, ValueError)):
            packed(DIM, width, 2**width)(wire, None)
    with pytest.raises(AssertionError):
        packed(DIM, 32, 2**32)(wire, None)
    assert "its claim is called rounding-safe, but it sends floats" in check_keys(CalledSafe(), LIKE, Key(0)).faults


# low bits


def copied(mask):
    """The lowest bits of the update in the place of the message's."""

    def how(liar, honest, state, memory, update, link, private):
        wire, memory = honest(state, memory, update, link, private)
        words, own = np.frombuffer(wire, "<u4"), update.numpy().view("<u4")
        return (words & ~np.uint32(mask) | own & np.uint32(mask)).tobytes(), memory

    return how


def coarse(kind):
    """Noise that is rounded to this type of floats, and then added in float32."""

    def how(liar, honest, state, memory, update, link, private):
        noise = (liar.sigma * rng.normal(private, (len(update),), torch.float64)).to(kind).float()
        return (clip_l2(update, liar.clip) + noise).numpy().astype("<f4").tobytes(), memory

    return how


GAUSSIAN = made("gaussian")
FAULTS = {
    **{f"{bits} low bits of the update": lying(GAUSSIAN, copied(2**bits - 1)) for bits in (1, 2, 8)},
    "the same at epsilon 0.1": lying(made("gaussian", epsilon=0.1), copied(255)),
    "the same at epsilon 50": lying(made("gaussian", epsilon=50.0), copied(255)),
    "the same, Laplace": lying(made("laplace"), copied(255)),
    "the same, UDP": lying(made("udp", clips="update"), copied(255)),
    "float16 noise": lying(GAUSSIAN, coarse(torch.float16)),
    "float16 noise at epsilon 0.1": lying(made("gaussian", epsilon=0.1), coarse(torch.float16)),
    "bfloat16 noise": lying(GAUSSIAN, coarse(torch.bfloat16)),
    "signs": lying(GAUSSIAN, bits_of_signs(1, pad=False)),
    "every fourth sign under a pad": lying(GAUSSIAN, bits_of_signs(4, pad=True)),
    "one sign under a pad": lying(GAUSSIAN, bits_of_signs(200, pad=True)),
}


def named(record):
    return [fault for fault in record.faults if fault.startswith("low-bits distinguisher: ")]


@pytest.mark.parametrize("name", FAULTS)
def test_low_bits_that_depend_on_the_update_are_found_by_name(name):
    (found,) = named(check_keys(FAULTS[name], LIKE, Key(0)))
    assert re.fullmatch(r".*the lowest bits tell (an|zero) .* apart in (7\d|80) of 80 messages \(p < 1e-12\)", found)


def test_an_audit_names_it(monkeypatch):
    monkeypatch.setattr(registry, "build", lambda *given: FAULTS["float16 noise"])
    found = standalone.audit("gaussian", {}, {}, 1, trials=60, seed=0)["audited"]
    assert found["verdict"] == "CONTRADICTED"
    assert any(text.startswith("low-bits distinguisher: ") for text in found["contradicts"])


def float32_pairs(liar, numbers, private):
    """The noise of `t-noise` before 0.2.0: float32 numbers, added in float32."""
    noise = TNoise.perturb(liar, torch.zeros(len(numbers)), private)
    return numbers + noise


def test_float32_noise_that_is_narrow_beside_the_update_is_found():
    (found,) = named(
        check_keys(lying(made("t-noise"), lambda d, _, *given: float32_pairs(d, *given), "perturb"), LIKE, Key(0))
    )
    assert "zero and a tiny update" in found  # which a scale of their own makes large
    assert not named(check_keys(made("t-noise"), LIKE, Key(0)))


def test_float32_noise_as_wide_as_the_update_is_missed():
    assert not named(
        check_keys(lying(GAUSSIAN, coarse(torch.float32)), LIKE, Key(0))
    )  # as the page on instruments says


@dataclasses.dataclass(frozen=True)
class Unstated(Defense[None, None]):
    """Normal noise of a type of floats, without a stated distribution; it may claim nothing."""

    kind: str = "float64"
    claims: bool = True

    def encode(self, state, memory, update, link, private):
        noise = rng.normal(private, (len(update),), torch.float64).to(getattr(torch, self.kind))
        return (clip_l2(update, 1.0) + noise).float().numpy().tobytes(), None

    def estimate(self, state, received, link):
        return unpack_float32(received, link.setting.dim)

    def claim(self, history, setting):
        proof = Proof.gaussian(0.5, len(history), Unit.MESSAGE, "normal noise.")
        claimed = claim_over(len(history), proof.epsilon(1e-5), proof, source="here", delta=1e-5)
        return claimed if self.claims else super().claim(history, setting)


@by_rows(("float64", True, 0), ("float16", True, 1), ("float16", False, 0))
def test_no_distribution_need_be_stated(kind, claims, found):
    assert len(named(check_keys(Unstated(kind, claims), LIKE, Key(0)))) == found


@by_rows("independent", "correlated", "uniform")
def test_honest_noise_is_seldom_told_apart(noise):
    """Two updates are told apart with a p-value below 0.05 in 5 % of cases at most, also of dependent noise."""

    def send(update, key):
        drawn = rng.normal(key, (len(update),), torch.float64)
        drawn = rng.uniform(key, (len(update),), -1.0, 1.0, torch.float64) if noise == "uniform" else drawn
        drawn = drawn.cumsum(0) if noise == "correlated" else drawn
        return (update.double() + drawn).float().numpy()

    values = [low_bits(send, 40, 1.0, Key(seed))[1] for seed in range(40)]
    assert sum(p <= 0.05 for p in values) <= at_most(0.05, 40)
    assert min(values) > 1e-6 / 40


def test_the_level_is_that_of_fishers_test():
    # 40 counted messages of each update: telling all apart has p = 1 / C(80, 40), and 36 of 40 still suffice
    assert stats.hypergeom.sf(35, 80, 40, 40) < 1e-12 / 3
