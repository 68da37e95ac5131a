"""The key check: honest code has no finding, and every class of hidden dependence has one."""

import dataclasses
import functools
import hashlib
import math
import time
import types

import numpy as np
import pytest
import torch

from leakgauge import Key, rng
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.audit.keys import check_keys
from leakgauge.harness.audit.neighbors import clip_of
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from tests.audit_case import setting_of
from tests.by_rows import by_rows
from tests.faults.library import chance, keyed, lying, made, noiseless, of_noise, only

NAMES = [
    *registry.classes("defense"),
    *(f"{first}+{second}" for first in ("gaussian", "laplace", "t-noise") for second in ("sdq", "sdq-lattice")),
]
T_LAWS = {"jopeq-t", "t-noise", "t-noise+sdq", "t-noise+sdq-lattice"}
LIKE = setting_of(36)


def parameters(name):
    """Three settings of a defense: its defaults, another epsilon, another clip; fewer if it has no such parameter."""
    known = registry.defaults("defense", name) if "+" not in name else {"epsilon": 1.0, "clip": 1.0}
    return [{}, *({field: value} for field, value in (("epsilon", 4.0), ("clip", 0.01)) if field in known)]


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ci("gaussian", "jopeq", "mvu", "ota-orthogonal", "udp", "vqsgd", "gaussian+sdq-lattice")  # others: audits
def test_honest_code_has_no_finding(name):
    for given in parameters(name):
        for seed in range(2):
            assert check_keys(made(name, **given), LIKE, Key(seed)).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_honest_code_has_no_finding_with_many_keys(name):
    for given in parameters(name):
        for seed in range(2, 10):
            assert check_keys(made(name, **given), LIKE, Key(seed)).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_check_is_short(name):
    start = time.process_time()
    record = check_keys(made(name), LIKE, Key(0))
    assert record.messages <= 800
    assert time.process_time() - start < (2 if name in T_LAWS else 1)


# secrets: A


def drawn_by(make):
    """Noise of `make(size, private)` [k] in the place of the defense's own."""
    return of_noise(lambda z, u, private, link: make(len(z), private))


GENERATOR = torch.Generator().manual_seed(7)
NUMPY = np.random.default_rng(7)
COUNT = iter(range(10**9))


def standard(key, size):
    return rng.normal(key, (size,), torch.float64).numpy()


def mixed(share):
    """Noise of which a part comes from the shared key."""

    def change(z, u, private, link):
        return math.sqrt(1 - share**2) * z + share * standard(link.key.child("mine"), len(z))

    return of_noise(change)


def bits_of_signs(every, pad):
    """The lowest bit of every nth number is the sign of the update, hidden by a pad from the shared key."""

    def how(liar, honest, state, memory, update, link, private):
        wire, memory = honest(state, memory, update, link, private)
        words = np.frombuffer(wire, "<u4").copy()
        at = np.arange(0, len(words), every)
        secret = (update.numpy()[at] > 0).astype(np.uint32)
        if pad:
            secret ^= rng.integers(link.key.child("pad"), len(at), 2).astype(np.uint32)
        words[at] = words[at] & ~np.uint32(1) | secret
        return words.tobytes(), memory

    return how


SECRETS = {
    "a generator seeded at import": drawn_by(lambda k, p: torch.randn(k, generator=GENERATOR).double().numpy()),
    "numpy's generator seeded at import": drawn_by(lambda k, p: NUMPY.standard_normal(k)),
    "a generator seeded in each message": drawn_by(lambda k, p: np.random.default_rng(7).standard_normal(k)),
    "a generator seeded by a counter": drawn_by(lambda k, p: np.random.default_rng(next(COUNT)).standard_normal(k)),
    "a constant key": drawn_by(lambda k, p: standard(Key(7, ("noise",)), k)),
    "a pool of 128 keys": drawn_by(lambda k, p: standard(Key(7, ("pool", int(128 * chance(p)))), k)),
    "the shared key": keyed(lambda link, private: link.key.child("noise")),
    "the shared key after the first message": only(
        lambda u, link, p, n: n > 0, keyed(lambda link, private: link.key.child("noise"))
    ),
    "the shared key for some clients": only(
        lambda u, link, p, n: link.sender.number % 4 == 0, keyed(lambda link, private: link.key.child("noise"))
    ),
    "nine tenths of the shared key": mixed(0.9),
    "a third of the shared key": mixed(0.34),
    "signs of the shared key": of_noise(
        lambda z, u, p, link: np.abs(z) * np.sign(standard(link.key.child("signs"), len(z)))
    ),
    "signs in the lowest bits": bits_of_signs(1, pad=False),
    "signs in the lowest bits, with a pad": bits_of_signs(1, pad=True),
    "signs in every fourth lowest bit, with a pad": bits_of_signs(4, pad=True),
    "a sign in one lowest bit, with a pad": bits_of_signs(200, pad=True),
}


# size: B


def without(where):
    """No noise in the numbers that `where(size, update, link)` selects [k], or in all."""
    return of_noise(lambda z, u, p, link: np.where(where(len(z), u, link), 0.0, z))


def repeated(size):
    """A buffer of noise, used again and again."""
    return of_noise(lambda z, u, p, link: np.resize(z[:size], len(z)))


def beyond(numbers):
    """Whether a number is in a tensor of more than this many."""
    return lambda k, u, link: np.repeat(np.array(link.setting.layout.sizes) > numbers, link.setting.layout.sizes)


def near(update, clip, low, high):
    return clip * (1 + low) <= float(update.double().norm()) <= clip * (1 + high)


SIZES = {
    "no noise in tensors above 1,000": without(beyond(1000)),
    "no noise in tensors above 50,000": without(beyond(50_000)),
    "no noise in tensors of 1,000 to 2,000": without(
        lambda k, u, link: beyond(1000)(k, u, link) & ~beyond(2000)(k, u, link)
    ),
    "a buffer of 1,024": repeated(1024),
    "a buffer of 8,192": repeated(8192),
    "a buffer of 30,000": repeated(30_000),
    "no noise above 200 records": only(lambda u, link, p, n: link.sender.samples > 200, noiseless),
    "no noise above 1,000 records": only(lambda u, link, p, n: link.sender.samples > 1000, noiseless),
    "no noise with one record": only(lambda u, link, p, n: link.sender.samples == 1, noiseless),
    "half of the noise above 20 clients": without(
        lambda k, u, link: np.arange(k) % 2 * (link.setting.clients > 50) > 0
    ),
    "half of the noise below 5 clients": without(lambda k, u, link: np.arange(k) % 2 * (link.setting.clients < 5) > 0),
    "no noise after the tenth round": only(lambda u, link, p, n: n >= 10, noiseless),
    "no noise after the twentieth round": only(lambda u, link, p, n: n >= 20, noiseless),
    "no noise at the clip": only(lambda u, link, p, n: near(u, 1.0, -1e-7, 1e-7), noiseless),
    "no noise just above the clip": only(lambda u, link, p, n: near(u, 1.0, 5e-7, 2e-6), noiseless),
    "no noise far above the clip": only(lambda u, link, p, n: near(u, 1.0, 1e5, 1e9), noiseless),
    "no noise for an update of 0": only(lambda u, link, p, n: not bool(u.any()), noiseless),
    "no noise for negative updates": only(lambda u, link, p, n: bool((u < 0).all()), noiseless),
    "no noise for tiny updates": only(lambda u, link, p, n: 0 < float(u.norm()) < 1e-5, noiseless),
}


# bytes: C


def with_bytes(change):
    """The message [bytes] becomes `change(wire, update)`."""

    def how(liar, honest, state, memory, update, link, private):
        wire, memory = honest(state, memory, update, link, private)
        return change(wire, update), memory

    return how


def first_bit(wire, update):
    return bytes([wire[0] & 0xFE | int(update[0] > 0)]) + wire[1:]


BYTES = {
    "the update appended": with_bytes(lambda wire, u: wire + u.numpy().tobytes()),
    "a digest appended": with_bytes(lambda wire, u: wire + hashlib.sha256(u.numpy().tobytes()).digest()[:4]),
    "a byte in front": with_bytes(lambda wire, u: bytes([int(u[0] > 0)]) + wire),
    "a length by the sign": with_bytes(lambda wire, u: wire + b"\0" * int(u[0] > 0)),
    "the last number missing by the sign": with_bytes(lambda wire, u: wire[: len(wire) - 4 * int(u[0] > 0)]),
    "a sign in the first bit": with_bytes(first_bit),
}

ADDITIVE = {**SECRETS, **SIZES, **BYTES}


@functools.cache
def base(name, epsilon):
    return made(name, epsilon=epsilon)


@pytest.mark.matrix
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("fault", ADDITIVE)
@pytest.mark.parametrize("name", ["gaussian", "laplace"])
@pytest.mark.ci(2)
def test_a_liar_with_additive_noise_is_found(name, fault, epsilon):
    liar = lying(base(name, epsilon), ADDITIVE[fault])
    assert check_keys(liar, LIKE, Key(3)).faults


DISCRETE_NAMES = ["mvu", "rqm", "vqsgd", "jopeq-sound", "jopeq", "sqsgd", "laplace+sdq"]


def spliced(share, stale):
    """The last part of the message's bytes are those of another key, the shared one or a constant."""

    def how(liar, honest, state, memory, update, link, private):
        key = Key(7, ("stale",)) if stale else link.key.child("stale")
        (wire, kept), (other, _) = (honest(state, memory, update, link, each) for each in (private, key))
        rng.uniform(private.child("nothing"), (1,))
        cut = len(wire) - int(share * len(wire)) // 3 * 3
        return wire[:cut] + other[cut:], kept

    return how


PARTS = {
    "a half of the shared key": spliced(0.5, False),
    "a quarter of the shared key": spliced(0.25, False),
    "a half of a constant key": spliced(0.5, True),
    "nearly all of the shared key": spliced(0.9, False),
}


@pytest.mark.matrix
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("fault", PARTS)
@pytest.mark.parametrize("name", ["mvu", "jopeq-sound", "jopeq", "laplace+sdq", "laplace+sdq-lattice"])
def test_levels_whose_randomness_is_shared_in_part_are_found(name, fault, epsilon):
    assert check_keys(lying(base(name, epsilon), PARTS[fault]), LIKE, Key(3)).faults


DISCRETE = {
    "the shared key": SECRETS["the shared key"],
    "a constant key": keyed(lambda link, private: Key(7, ("noise",))),
    "a pool of 128 keys": keyed(lambda link, private: Key(7, ("pool", int(128 * chance(private))))),
    "a counter": keyed(lambda link, private: Key(next(COUNT), ("count",))),
    **BYTES,
}


@pytest.mark.matrix
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("fault", DISCRETE)
@pytest.mark.parametrize("name", DISCRETE_NAMES)
@pytest.mark.ci(2)
def test_a_liar_with_discrete_messages_is_found(name, fault, epsilon):
    try:
        honest = base(name, epsilon)
        assert not check_keys(honest, LIKE, Key(3)).faults
    except ValueError as error:
        pytest.skip(str(error))
    assert check_keys(lying(honest, DISCRETE[fault]), LIKE, Key(3)).faults


def test_noise_of_a_sum_that_shrinks_when_clients_drop_out_is_found():
    def shrunk(liar, honest, updates, links, private):
        mean, other = (honest(updates, links, key) for key in (private, private.child("other")))
        return mean if len(updates) > 6 else (mean + other) / 2

    assert not check_keys(made("dp-fedavg"), LIKE, Key(3)).faults
    assert check_keys(lying(made("dp-fedavg"), shrunk, "average"), LIKE, Key(3)).faults


def test_a_record_states_the_range_that_was_looked_at():
    record = check_keys(made("gaussian"), LIKE, Key(0))
    assert (record.dims, record.clients) == ((200, 101_770), (3, 400))
    assert (record.samples, record.rounds) == ((1, 100_000), (0, 10_000))


@pytest.mark.matrix
@pytest.mark.parametrize("dim", [100_000, 3_000_000])
def test_a_long_message_is_no_repeated_buffer_but_one_that_repeats_a_tenth_is(dim):
    study = dataclasses.replace(setting_of(36), layout=Layout(("all",), ((dim,),)))
    assert not check_keys(base("gaussian", 8.0), LIKE, Key(3), study).faults
    faults = check_keys(lying(base("gaussian", 8.0), repeated(dim * 9 // 10)), LIKE, Key(3), study).faults
    assert any("there twice" in fault for fault in faults)


@dataclasses.dataclass(frozen=True)
class Worded(Gaussian):
    """Fields of a user that an audit must not take for its own."""

    records: int = 5
    layout: str = "wide"
    looked_at: str = "once"


def test_names_of_a_users_fields_do_not_matter():
    assert not check_keys(Worded(), LIKE, Key(3)).faults
    assert clip_of(Worded()) == 1.0
    for clip in (None, "1", -1.0, math.inf, math.nan, True):
        assert clip_of(types.SimpleNamespace(clip=clip)) == 1.0
    assert clip_of(types.SimpleNamespace(clip=3)) == 3.0


def studied(**changes):
    """The federation of a study."""
    layout = Layout(("first", "second"), ((300, 70), (70,)))
    return dataclasses.replace(setting_of(36), **{"layout": layout, "clients": 900, "participants": 900} | changes)


@pytest.mark.matrix
@by_rows(
    ("no noise in 21,000 numbers", without(lambda k, u, link: beyond(20_000)(k, u, link) & (k < 30_000))),
    (
        "half of the noise with 900 clients",
        without(lambda k, u, link: np.arange(k) % 2 > (link.setting.clients != 900)),
    ),
    ("no noise with 7,777 records", only(lambda u, link, p, n: link.sender.samples == 7777, noiseless)),
    ("no noise in round 99", only(lambda u, link, p, n: n == 99, noiseless)),
)
def test_a_fault_at_the_size_of_a_study_alone_is_found_there(name, fault):
    liar = lying(base("gaussian", 8.0), fault)
    study = studied(samples=7777, rounds=100)
    assert not check_keys(liar, LIKE, Key(3)).faults
    record = check_keys(liar, LIKE, Key(3), study)
    assert record.faults, name
    assert record.clients[1] == 900
    assert record.rounds == (0, 10_000)
    assert not check_keys(base("gaussian", 8.0), LIKE, Key(3), study).faults
