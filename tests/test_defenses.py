"""The checks of every defense in the registry, then the distributions of the Gaussian and the Laplace mechanism."""

import dataclasses
import math

import pytest
import torch
from scipy import stats

from leakgauge import Key, Layout, Link, Links, MessageError, Sender, Setting, rng
from leakgauge.defenses._common.clip import clip_coordinates, clip_l2
from leakgauge.defenses._common.plain import Plain
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.claim import Verdict, judge, nothing_promised
from leakgauge.harness.federation import registry
from leakgauge.testing import Effort, checks_of
from tests.by_rows import by_rows
from tests.oracles import follows

D = 1000
SETTING = Setting(
    Layout(("w",), ((D,),)), clients=4, participants=4, rounds=3, sends="gradient", steps=1, lr=0.1, batch=8, samples=8
)
SENDERS = [Sender(number, 8) for number in range(4)]
PRIVATE, SHARED, CHANNEL = (Key(0).child(name) for name in ("private", "shared", "channel"))
UPDATE = 0.01 * rng.normal(Key(1), (D,))

CASCADES = ["laplace+sdq", "t-noise+sdq-lattice", "gaussian+sdq", "laplace+sdq-lattice", "t-noise+sdq"]
every_defense = pytest.mark.parametrize("defense", [*registry.classes("defense"), *CASCADES])


@dataclasses.dataclass(frozen=True)
class Shifted(Plain):
    """No defense, with a negative likelihood: a likelihood is defined up to a constant."""

    def likelihood(self, state, received, links):
        score = super().likelihood(state, received, links)
        return lambda update: score(update) - 1e6

    def claim(self, history, setting):
        return nothing_promised(len(history), "The update is sent as it is.")


def encode(defense, update, private=PRIVATE, shared=SHARED, sender=SENDERS[0], setting=SETTING):
    state, memory = defense.init(setting), defense.remember(setting)
    return defense.encode(state, memory, update, Link(setting, sender, shared), private)[0]


def receive(defense, update, private=PRIVATE, shared=SHARED, sender=SENDERS[0], setting=SETTING):
    """The received message of one client; if the channel adds messages, the other clients send zeros."""
    others = [who for who in SENDERS if who != sender] if defense.superposes else []
    wires = [encode(defense, update, private, shared, sender, setting)]
    wires += [encode(defense, torch.zeros_like(update), private.child(k.number), shared, k, setting) for k in others]
    (received,) = defense.transmit(defense.init(setting), wires, Links(setting, [sender, *others], None), CHANNEL)
    return received


def decode(defense, received, setting=SETTING, shared=SHARED):
    return defense.estimate(defense.init(setting), received, Link(setting, SENDERS[0], shared))


IN_CLEAR = ("jopeq", "jopeq-t", "sdq", "sdq-lattice", "t-noise", "cepam-gaussian", "cepam-laplace")
"""Defenses that send a norm or scales in clear at their defaults."""

SCALED = [(name, {"scale": scale}) for name in ("jopeq", "jopeq-t", "mvu", "laplace", "t-noise", "laplace+sdq")
          for scale in ("tensor", "vector", "public")]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters"), [*((name, {}) for name in registry.classes("defense")), *SCALED])
def test_a_scale_is_sent_in_clear_unless_it_is_public(name, parameters):
    check = dict(checks_of("defense"))["plaintext"]
    shows = parameters["scale"] != "public" if parameters else name in IN_CLEAR
    assert check(registry.build("defense", name, parameters)).mark == ("ok" if shows else "skipped")


# ---- the suite of `leakgauge.testing`: every check of every defense

EFFORT = Effort(trials=200, evaluations=100, victims=2)
FITTED = ("cepam-clip", "cepam-laplace", "jopeq-sound", "sdq", "t-noise", "udp-crd")
"""In CI, messages of these are tested in tests/test_fault_library.py, and those of the others here."""

STATISTICAL = ("estimate", "clip", "noise", "likelihood")
COSTLY = ("claim", "distribution", "dependence", "audit", "training", "attacks")
BLURRED = ("gaussian+sdq", "likelihood")
"""It takes the error of coarse cells as noise of its variance, which makes near updates too alike."""


def checks(*names):
    return pytest.mark.parametrize(
        ("name", "check"), [pair for pair in checks_of("defense", EFFORT) if pair[0] in names]
    )


@checks(*(name for name, _ in checks_of("defense") if name not in (*STATISTICAL, *COSTLY)))
@every_defense
def test_a_shipped_defense_passes_every_check_of_its_messages(defense, name, check):
    check(defense)


@pytest.mark.matrix
@checks(*STATISTICAL)
@every_defense
def test_a_shipped_defense_passes_every_check_by_samples(defense, name, check):
    if (defense, name) != BLURRED:
        check(defense)


@pytest.mark.matrix
@checks(*COSTLY)
@pytest.mark.parametrize("defense", registry.classes("defense"))
@pytest.mark.ci(without=[f"{name}-claim-check0" for name in FITTED])
def test_a_shipped_defense_passes_every_check_by_an_audit_and_a_study(defense, name, check):
    check(defense)


def test_a_likelihood_may_be_shifted_by_a_constant():
    assert dict(checks_of("defense"))["likelihood"](Shifted).mark == "ok"
    score = Shifted().likelihood(None, [encode(Shifted(), UPDATE)], Links(SETTING, SENDERS[:1], None))
    assert float(score(UPDATE[None])) == -1e6


def test_none_is_exact_and_promises_nothing():
    wire = encode(NoDefense(), UPDATE)
    assert torch.equal(decode(NoDefense(), wire), UPDATE)
    assert len(wire) == 4 * D
    assert judge(NoDefense().claim([None], SETTING)).verdict is Verdict.NOTHING_PROMISED


def test_a_message_that_is_not_finite_is_refused():
    with pytest.raises(MessageError, match="finite message, got 1 non-finite"):
        decode(NoDefense(), bytes(4 * (D - 1)) + b"\x00\x00\xc0\x7f")


@by_rows(
    (Gaussian(clip=1.0, epsilon=2.0), lambda self: stats.norm(scale=self.sigma).cdf),
    (Gaussian(clip=0.5, noise_std=0.01), lambda _: stats.norm(scale=0.01).cdf),
    (Laplace(clip=0.02, epsilon=2.0), lambda _: stats.laplace(scale=0.02).cdf),
    (Laplace(clip=0.02, noise_std=0.1), lambda _: stats.laplace(scale=0.1 / 2**0.5).cdf),
)
def test_the_error_has_exactly_the_stated_distribution(defense, distribution):
    # alpha 1e-6; 300,000 errors see a scale off by 6 % with a miss rate under 1e-6 (see the twin)
    d = 300_000
    setting = dataclasses.replace(SETTING, layout=Layout(("w",), ((d,),)))
    update = 0.01 * rng.normal(Key(5), (d,))
    kept = clip_l2(update, defense.clip) if isinstance(defense, Gaussian) else clip_coordinates(update, defense.clip)
    error = (decode(defense, encode(defense, update, setting=setting), setting).double() - kept.double()).numpy()
    assert follows(error, distribution(defense))
    assert not follows(1.06 * error, distribution(defense))
    assert abs(stats.pearsonr(error[1:], error[:-1]).statistic) < 5 / d**0.5


def test_gaussian_noise_is_calibrated_to_twice_the_clip():
    # sensitivity 1, delta 1e-5, sigma 1 -> epsilon 4.3771780957, see test_accounting
    defense = Gaussian(clip=3.0, noise_std=6.0, delta=1e-5)
    claim = defense.claim([None], SETTING)
    assert claim.epsilon == judge(claim).proved == pytest.approx(4.3771780957, rel=1e-9)
    assert Gaussian(clip=3.0, epsilon=4.3771780957).sigma == pytest.approx(6.0, rel=1e-8)
    four = defense.claim([None] * 4, SETTING)  # mu sqrt(4) = 2, i.e. sigma 0.5
    assert four.epsilon == pytest.approx(9.9972561464, rel=1e-9)


def test_laplace_claims_a_coordinate_and_rounds_add_up():
    claim = Laplace(epsilon=2.0).claim([None] * 3, SETTING)
    assert claim.unit.value == "coordinate"
    assert claim.epsilon == judge(claim).proved == pytest.approx(6.0, rel=1e-12)
    (whole,) = claim.further
    assert whole.epsilon(0.0) == pytest.approx(6.0 * D, rel=1e-12)


UDPS = ("udp", "udp-crd", "udp-lei")
SUMS = ("skellam", "distributed-gaussian", "poisson-binomial")


@by_rows(
    ("gaussian", {"epsilon": 0.0}, "expected epsilon > 0, got epsilon=0.0"),
    ("gaussian", {"epsilon": -1.0}, "expected epsilon > 0"),
    ("gaussian", {"epsilon": math.inf}, "expected epsilon > 0"),
    ("gaussian", {"clip": 0.0}, "expected clip > 0"),
    ("gaussian", {"delta": 1.0}, "expected 0 < delta < 1"),
    ("gaussian", {"epsilon": 1.0, "noise_std": 1.0}, "expected epsilon or noise_std, got both"),
    ("dp-sgd", {"clip": 0.0}, "expected clip > 0"),
    ("dp-sgd", {"noise_std": math.inf}, "expected noise_std > 0"),
    ("dp-sgd", {"delta": 0.0}, "expected 0 < delta < 1"),
    ("laplace", {"noise_std": math.nan}, "expected noise_std > 0"),
    ("laplace", {"epsilon": 1.0, "noise_std": 1.0}, "expected epsilon or noise_std, got both"),
    ("piecewise", {"epsilon": 0.0}, "expected epsilon > 0, got epsilon=0.0"),
    ("piecewise", {"clip": math.inf}, "expected clip > 0"),
    ("ppr", {"alpha": 1.0}, "expected alpha > 1, got alpha=1.0"),
    ("ppr", {"epsilon": 1000.0}, r"expected epsilon / \(2 alpha\) <= 12, got 250"),
    ("ppr", {"form": "sphere"}, "expected form direction or ball, got form='sphere'"),
    ("privunit", {"epsilon": -1.0}, "expected epsilon > 0, got epsilon=-1.0"),
    ("privunit", {"clip": math.nan}, "expected clip > 0"),
    ("privunit", {"form": "sphere"}, "expected form direction or ball, got form='sphere'"),
    ("vqsgd", {"repeats": 0}, "expected repeats > 0, got repeats=0"),
    ("vqsgd", {"epsilon": math.nan}, "expected epsilon > 0"),
    ("vqsgd", {"clip": -1.0}, "expected clip > 0"),
    ("top-k", {"fraction": 0.0}, "expected 0 < fraction <= 1, got fraction=0.0"),
    ("top-k", {"fraction": 1.5}, "expected 0 < fraction <= 1"),
    ("dp-fedavg", {"epsilon": 1.0, "noise_std": 1.0}, "expected epsilon or noise_std, got both"),
    ("dp-fedavg", {"delta": 0.0}, "expected 0 < delta < 1"),
    ("dp-fedavg", {"clip": 0.0}, "expected clip > 0"),
    *((name, {"bits": 1}, "expected bits between 2 and 20, got bits=1") for name in SUMS),
    *((name, {"delta": 0.0}, "expected 0 < delta < 1") for name in SUMS),
    ("dp-ftrl", {"band": 0}, "expected band >= 1, got band=0"),
    ("dp-ftrl", {"epsilon": math.nan}, "expected epsilon > 0"),
    ("cepam-gaussian", {"noise_std": 0.0}, "expected noise_std > 0"),
    ("cepam-gaussian", {"gamma": math.inf}, "expected gamma > 0"),
    ("cepam-gaussian", {"local_epsilon": -1.0}, "expected local_epsilon > 0"),
    ("cepam-gaussian", {"dimension": 4}, "expected dimension 1, 2 or 3, got dimension=4"),
    ("cepam-laplace", {"noise_scale": math.nan}, "expected noise_scale > 0"),
    ("cepam-laplace", {"gamma": 0.0}, "expected gamma > 0"),
    ("cepam-clip", {"clip": 0.0}, "expected clip > 0"),
    ("cepam-clip", {"dimension": 0}, "expected dimension 1, 2 or 3, got dimension=0"),
    ("jopeq", {"epsilon": 0.0}, "expected epsilon > 0, got epsilon=0.0"),
    ("jopeq", {"bits": 0}, "expected 1 to 16 bits, got bits=0"),
    ("jopeq", {"bits": 17}, "expected 1 to 16 bits, got bits=17"),
    ("jopeq", {"gamma": 0.0}, "expected gamma > 0, got gamma=0.0"),
    ("jopeq", {"gamma": "printed"}, "expected gamma reference, paper or a number, got gamma='printed'"),
    ("jopeq", {"clip": -1.0}, "expected clip > 0"),
    ("jopeq-sound", {"epsilon": math.inf}, "expected epsilon > 0"),
    ("jopeq-sound", {"clip": 0.0}, "expected clip > 0"),
    ("sdq", {"gamma": -1.0}, "expected gamma > 0"),
    ("sdq-lattice", {"bits": 17}, "expected 1 to 16 bits"),
    ("t-noise", {"epsilon": 5.0}, "expected epsilon 0.84, 1, 2, 3, 4, or another with s2 and nu, got epsilon=5.0"),
    ("t-noise", {"s2": 1.0}, "expected both s2 and nu or neither, got s2=1.0 and nu=None"),
    ("t-noise", {"s2": 1.0, "nu": 2.0}, "more than 2 degrees of freedom"),
    ("t-noise", {"s2": -1.0, "nu": 3.0}, "expected s2 > 0"),
    ("t-noise", {"epsilon": -2.0, "s2": 1.0, "nu": 3.0}, "expected epsilon > 0"),
    ("jopeq-t", {"epsilon": 5.0}, "expected epsilon 0.84"),
    ("jopeq-t", {"nu": 4.0}, "expected both s2 and nu or neither"),
    ("jopeq-t", {"bits": 1, "gamma": "paper"}, r"expected a step below 2.44949, .* got step=3; use more bits"),
    ("jopeq-t", {"clip": 0.0}, "expected clip > 0"),
    ("mvu", {"epsilon": 0.0}, "expected epsilon > 0"),
    ("mvu", {"epsilon": 100.0}, "expected 0.01 <= epsilon <= 24"),
    ("mvu", {"bits": 5}, "expected bits_in between 1 and 4"),
    ("mvu", {"clip": -1.0}, "expected clip > 0"),
    ("rqm", {"epsilon": 0.0}, "expected 0.001 <= epsilon <= 24, got 0"),
    ("rqm", {"epsilon": 1000.0}, "expected 0.001 <= epsilon <= 24, got 1000"),
    ("rqm", {"epsilon": math.nan}, "expected 0.001 <= epsilon <= 24, got nan"),
    ("rqm", {"epsilon": 1.0, "margin": 1.0}, "expected epsilon or margin, got both"),
    *(("rqm", {"margin": margin}, "expected 0 < margin <= 1e\\+06, got") for margin in (0.0, 1e7, math.nan)),
    ("rqm", {"margin": 1e-9}, "expected outcomes of probability 1e-11 or more, got"),
    ("rqm", {"keep": 1.0}, "expected 0 < keep < 1, got keep=1.0"),
    ("rqm", {"keep": 1 - 1e-9}, "expected outcomes of probability 1e-11 or more, got"),
    ("rqm", {"levels": 1}, "expected 2 to 64 levels, got levels=1"),
    ("rqm", {"levels": 65}, "expected 2 to 64 levels"),
    ("rqm", {"clip": math.nan}, "expected clip > 0"),
    ("sqsgd", {"epsilon": 0.0}, "expected epsilon > 0"),
    ("sqsgd", {"clip": -1.0}, "expected clip > 0"),
    ("sqsgd", {"bits": 0}, "expected 1 to 16 bits, got bits=0"),
    ("sqsgd", {"ratio": 1.5}, "expected 0 < ratio <= 1"),
    ("sqsgd", {"share": 1.0}, "expected 0 < share < 1"),
    ("sqsgd", {"alpha": -1.0}, "expected alpha >= 0"),
    ("sqsgd", {"beta": 0.0}, "expected beta > 0"),
    *(
        (name, *row)
        for name in ("ota", "ota-orthogonal")
        for row in (
            ({"clip": 0.0}, "expected clip > 0, got clip=0.0"),
            ({"epsilon": math.inf}, "expected epsilon > 0"),
            ({"delta": 1.0}, "expected 0 < delta < 1, got delta=1.0"),
            ({"delta": 0.0}, "expected 0 < delta < 1"),
            ({"power": -1.0}, "expected power > 0"),
            ({"noise_variance": -1.0}, "expected noise_variance >= 0"),
            ({"fading": "rician"}, "expected fading rayleigh or equal, got 'rician'"),
            ({"gains": "1;2"}, "expected comma-separated squared gains, got gains='1;2'"),
            ({"gains": "1,,2"}, "expected comma-separated squared gains"),
            ({"gains": "1,0"}, r"expected squared gains > 0, got \(1.0, 0.0\)"),
        )
    ),
    *((name, {"epsilon": value}, "expected epsilon > 0") for name in UDPS for value in (0.0, -1.0)),
    *((name, {"delta": value}, "expected 0 < delta < 1") for name in UDPS for value in (0.0, 1.0)),
    *((name, {"rounds": 0}, "expected rounds >= 1, got rounds=0") for name in UDPS),
    *((name, {"clip": 0.0}, "expected clip > 0") for name in UDPS),
    ("udp", {"epsilon": math.inf}, "expected epsilon > 0"),
    ("udp", {"calibration": "rdp"}, "expected calibration paper, zcdp or tight, got 'rdp'"),
    ("udp", {"clips": "layers"}, "expected clips records or update, got 'layers'"),
    ("udp-crd", {"beta": 0.0}, "expected 0 < beta < 1, got beta=0.0"),
    ("udp-crd", {"beta": 1.0}, "expected 0 < beta < 1, got beta=1.0"),
    ("udp-crd", {"zeta": -0.1}, "expected zeta >= 0, got zeta=-0.1"),
    ("udp-crd", {"zeta": math.nan}, "expected zeta >= 0"),
    ("udp-lei", {"first": 0.0}, "expected first > 0"),
    ("udp-lei", {"first": 0.5}, "expected a first round within the budget"),
    ("udp-lei", {"slope": -0.1}, "expected slope >= 0, got slope=-0.1"),
    *(("soteria", {"rate": rate}, f"expected 0 < rate < 1, got rate={rate}") for rate in (0.0, 1.0, -0.1, math.nan)),
    *(("precode", {"width": width}, f"expected width >= 1, got width={width}") for width in (0, -1)),
    *(("precode", {"beta": beta}, f"expected 0 <= beta < inf, got beta={beta}") for beta in (-1.0, math.inf, math.nan)),
    *(
        ("random-mask", {"share": share}, rf"expected 0 < share <= 1, got share={share}")
        for share in (0.0, -0.1, 1.5, math.nan)
    ),
)
def test_parameters_out_of_range_are_named(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        registry.classes("defense")[name](**parameters)


def test_clipping_never_grows_a_norm_and_leaves_short_updates_alone():
    assert torch.equal(clip_l2(UPDATE, 100.0), UPDATE)
    assert torch.equal(clip_l2(torch.zeros(3), 1.0), torch.zeros(3))
    long = 1e6 * UPDATE
    assert float(clip_l2(long, 1.0).double().norm()) == pytest.approx(1.0, rel=1e-6)
    assert clip_coordinates(long, 0.5).abs().max() == 0.5
    rows = torch.stack([UPDATE, long])
    assert torch.equal(clip_l2(rows, 1.0)[1], clip_l2(long, 1.0))
