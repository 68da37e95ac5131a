"""The library of faults: every class of fault, mild and strong, in every kind of mechanism.

A liar is a shipped defense whose `encode` is replaced; its claim and its distribution stay. `how(liar, honest, *call)`
makes the
message: `honest` is the replaced method and `call` are its arguments.
"""

import dataclasses
import functools
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from tests.faults import best

STEPS = 4
"""Local steps under which the faults of local training are tried."""


def _seldom():
    """A message of 3000 numbers, and of more."""
    needed = {numbers: best.messages(best.mvu(8.0, 24.0, 0.01, numbers)) for numbers in (3000, 21_000)}
    return (
        "3000 numbers hold one error, so that a message without any is no news: no test sees it in fewer than "
        f"{needed[3000]:,.0f} messages, or {needed[21_000]:,.0f} of 21,000 numbers"
    )


def _one_bit(epsilon):
    """A message of one bit a coordinate."""
    needed = best.messages(best.sqsgd(epsilon, 24.0, 1, 0.05))
    return (
        "a message of one bit a coordinate says too little of its update: a clean one is no news, and no test sees "
        f"them in fewer than {needed:,.0f} messages"
    )


MISSED = {
    (8.0, "MVU: 1 % clean messages"): _seldom,
    (8.0, "SqSGD, 1 bits: 5 % clean messages"): functools.partial(_one_bit, 8.0),
    (1.0, "SqSGD, 1 bits: 5 % clean messages"): functools.partial(_one_bit, 1.0),
}
"""Faults that pass, by the epsilon of their claim, with functions that say why."""


class Fault(NamedTuple):
    """A liar: the class of its fault as in the table of docs/audit-power.md, what it does, and itself."""

    kind: str
    name: str
    liar: Any


def lying(base, how, method="encode"):
    """A defense like `base`, with another `encode` or other method."""

    def lie(self, *call):
        return how(self, getattr(super(liar, self), method), *call)

    liar = type(type(base).__name__, (type(base),), {method: lie})
    found = object.__new__(liar)
    found.__dict__.update(vars(base))
    return found


def changed(**changes):
    """Messages of the defense with other parameters."""

    def how(liar, honest, *call):
        return type(liar).__mro__[1].encode(dataclasses.replace(liar, **changes), *call)

    return how


def noiseless(liar, honest, state, memory, update, link, private):
    """A message with hardly any noise."""
    return type(liar).__mro__[1].encode(liar.low_noise_variant(), state, memory, update, link, private)


def only(when, what):
    """The fault `what` in messages for which `when(update, link, private, count)`; the memory counts messages."""

    def how(liar, honest, state, memory, update, link, private):
        count = memory if isinstance(memory, int) else 0
        inner = None if isinstance(memory, int) else memory
        call = (state, inner, update, link, private)
        wire, inner = what(liar, honest, *call) if when(update, link, private, count) else honest(*call)
        return wire, count + 1 if inner is None else inner

    return how


def chance(private):
    """A uniform number of this message."""
    return float(rng.uniform(private.child("rare"), (1,))[0])


def keyed(key_of):
    """Noise from another key."""

    def how(liar, honest, state, memory, update, link, private):
        return honest(state, memory, update, link, key_of(link, private))

    return how


class _Leaky(Key):
    """A private key whose children of one last name are children of the shared key."""

    def __init__(self, key, leak, shared, rest=()):
        self.__dict__.update(vars(key), leak=leak, shared=shared, rest=rest)

    def child(self, *parts):
        """A leaky key, or one of the shared key."""
        rest = (*self.rest, *parts)
        if parts[-1] == self.leak:
            return self.shared.child("leaked", *rest)
        return _Leaky(super().child(*parts), self.leak, self.shared, rest)


def leaking(name):
    """One private draw, by the last name of its key, from the shared key."""

    def how(liar, honest, state, memory, update, link, private):
        return honest(state, memory, update, link, _Leaky(private, name, link.key))

    return how


def other_update(change):
    """An honest message of another update."""

    def how(liar, honest, state, memory, update, link, private):
        return honest(state, memory, change(liar, update), link, private)

    return how


def by_tensor(liar, update):
    """Each tensor scaled so that it alone is within the clip; sums may exceed it."""
    parts = torch.split(update, [121, 44, len(update) - 165])
    return torch.cat([part * min(1.0, liar.clip / max(float(part.double().norm()), 1e-30)) for part in parts])


def appended(data):
    """More bytes after the message."""

    def how(liar, honest, state, memory, update, link, private):
        wire, memory = honest(state, memory, update, link, private)
        return wire + data(update), memory

    return how


def last_bytes(liar, honest, state, memory, update, link, private):
    """The norm in the place of the last number."""
    wire, memory = honest(state, memory, update, link, private)
    return wire[:-4] + struct.pack("<f", float(update.double().norm().clamp(max=1e30))), memory


def of_noise(change):
    """Noise z [k] around a center [k], in units of its scale, becomes `change(z, center, private, link)`."""

    def how(liar, honest, state, memory, update, link, private):
        wire, memory = honest(state, memory, update, link, private)
        distribution = liar.message_distribution(state, memory, update, link)
        head = 4 * len(distribution.header)
        sent = np.frombuffer(wire[head:], distribution.dtype).astype(np.float64)
        z = change((sent - distribution.center) / distribution.scale, distribution.center, private, link)
        return wire[:head] + (distribution.center + distribution.scale * z).astype(distribution.dtype).tobytes(), memory

    return how


def telescoping(liar, honest, state, memory, update, link, private):
    """This round's noise less that of the round before: it cancels in the sum over rounds."""
    wire, _ = honest(state, None, update, link, private)
    distribution = liar.message_distribution(state, None, update, link)
    z = (
        np.frombuffer(wire[4 * len(distribution.header) :], distribution.dtype).astype(np.float64) - distribution.center
    ) / distribution.scale
    before = np.zeros_like(z) if memory is None else memory
    sent = distribution.center + distribution.scale * (z - before) / (1 if memory is None else 2**0.5)
    return wire[: 4 * len(distribution.header)] + sent.astype(distribution.dtype).tobytes(), z


def along(z):
    """The part of z [k] along a direction that only the liar knows."""
    direction = rng.normal(Key(5, ("direction",)), (len(z),), torch.float64).numpy()
    return direction * (z @ direction) / (direction @ direction)


def pick(private, k, share):
    """[k] whether each number is chosen, by a key of this message."""
    return rng.uniform(private.child("pick"), (k,)).numpy() < share


def drawn(key, k):
    """[k] normal numbers."""
    return rng.normal(key, (k,), torch.float64).numpy()


def of_client(private, number):
    """The private key of another client in the same round."""
    *before, _, last = private.path
    return Key(private.seed, (*before, number, last))


def of_pair(first, second, share):
    """Noise of the second client of which this share is the first one's; negative: the opposite."""

    def change(z, u, private, link):
        own = drawn(private, len(z))
        if link.sender.number != second:
            return own
        return math.sqrt(1 - share**2) * own + share * drawn(of_client(private, first), len(z))

    return change


def of_triple(z, u, private, link):
    """Noise of client 17 whose signs are the products of those of clients 2 and 9."""
    own = drawn(private, len(z))
    if link.sender.number != 17:
        return own
    return np.abs(own) * np.sign(math.prod(drawn(of_client(private, k), len(z)) for k in (2, 9)))


def stream(count):
    """Noise of one of `count` streams."""
    return lambda z, u, private, link: drawn(Key(7, ("stream", int(count * chance(private)))), len(z))


def bit_of(number, pad):
    """The lowest bit of one number is the sign of the update there, hidden by a pad from the shared key or not."""

    def how(liar, honest, state, memory, update, link, private):
        wire, memory = honest(state, memory, update, link, private)
        words = np.frombuffer(wire, "<u4").copy()
        secret = int(update[number] > 0) ^ (int(rng.integers(link.key.child("pad"), 1, 2)[0]) if pad else 0)
        words[number] = words[number] & ~np.uint32(1) | np.uint32(secret)
        return words.tobytes(), memory

    return how


TOGETHER = {
    "of client 14 is that of client 3": ("clients", of_pair(3, 14, 1.0)),
    "of client 14 is the opposite of client 3's": ("clients", of_pair(3, 14, -1.0)),
    "of client 19 is a third of client 0's": ("clients", of_pair(0, 19, 0.33)),
    "of client 12 is partly the opposite of client 7's": ("clients", of_pair(7, 12, -0.5)),
    "has signs that three clients share": ("clients", of_triple),
    "from one of 1,024 streams": ("copies", stream(1024)),
    "from one of 16,384 streams": ("copies", stream(16_384)),
}
"""Changes of normal noise that only several messages show: kind, and how."""

NOISE = {
    "half of the scale": ("scale", lambda z, u, p, s: 0.5 * z),
    "0.8 of the scale": ("scale", lambda z, u, p, s: 0.8 * z),
    "0.95 of the scale": ("scale", lambda z, u, p, s: 0.95 * z),
    "cut at 3": ("tail", lambda z, u, p, s: np.clip(z, -3, 3)),
    "folded at 3": ("tail", lambda z, u, p, s: np.where(abs(z) > 3, z / 2, z)),
    "none in 1 % of coordinates": ("rare", lambda z, u, p, s: np.where(pick(p, len(z), 0.01), 0.0, z)),
    "none in one random coordinate": (
        "rare",
        lambda z, u, p, s: np.where(np.arange(len(z)) == int(chance(p) * len(z)), 0, z),
    ),
    "none where the update is zero": ("update", lambda z, u, p, s: np.where(u == 0, 0.0, z)),
    "less where the update is large": ("update", lambda z, u, p, s: z * np.where(abs(u) > np.median(abs(u)), 0.9, 1.0)),
    "a tenth of the sign added": ("update", lambda z, u, p, s: z + 0.1 * np.sign(u)),
    "size moved to the sign": (
        "update",
        lambda z, u, p, s: abs(z) * np.where(pick(p, len(z), 0.05), np.sign(u), np.sign(z)),
    ),
    "the same for two neighbors": ("copies", lambda z, u, p, s: z[np.arange(len(z)) // 2 * 2]),
    "opposite for two neighbors": (
        "copies",
        lambda z, u, p, s: z[np.arange(len(z)) // 2 * 2] * (1 - 2 * (np.arange(len(z)) % 2)),
    ),
    "a table of 64 values": ("copies", lambda z, u, p, s: np.sort(z)[:64][(np.arange(len(z)) * 37) % 64]),
    "rounded to 1/256": ("copies", lambda z, u, p, s: np.round(256 * z) / 256),
    "none in one direction": ("direction", lambda z, u, p, s: z - along(z)),
    "half in one direction": ("direction", lambda z, u, p, s: z - along(z) / 2),
    "twice in one direction": ("direction", lambda z, u, p, s: z + along(z)),
    "by the client's size": ("sender", lambda z, u, p, link: z * (0.8 if link.sender.samples > 100 else 1.0)),
    "less for one client": ("sender", lambda z, u, p, link: z * (0.6 if link.sender.number == 7 else 1.0)),
}
"""Changes of float noise: kind, and how."""

ANY = {
    "the shared key's": ("replay", keyed(lambda link, private: link.key.child("noise"))),
    "one key for all rounds": ("rounds", keyed(lambda link, private: Key(link.sender.number, ("one",)))),
    "one key for all clients": ("rounds", keyed(lambda link, private: Key(0, private.path[:-3]))),
    "none after the fifth message": ("rounds", only(lambda u, link, p, n: n >= 5, noiseless)),
    "none in one round": ("rounds", only(lambda u, link, p, n: n == 3, noiseless)),
    "none in 1 % of messages": ("rare", only(lambda u, link, p, n: chance(p) < 0.01, noiseless)),
    "none in 10 % of messages": ("rare", only(lambda u, link, p, n: chance(p) < 0.1, noiseless)),
    "none for one client": ("sender", only(lambda u, link, p, n: link.sender.number == 11, noiseless)),
    "none for large clients": ("sender", only(lambda u, link, p, n: link.sender.samples > 150, noiseless)),
    "none above a norm": ("norm", only(lambda u, link, p, n: float(u.double().norm()) > 100, noiseless)),
    "none below a norm": ("norm", only(lambda u, link, p, n: float(u.double().norm()) < 1e-2, noiseless)),
    "none for sparse updates": ("update", only(lambda u, link, p, n: int((u != 0).sum()) < 10, noiseless)),
    "a norm appended": ("bytes", appended(lambda u: pack_float32(u.double().norm()[None].clamp(max=1e30).float()))),
    "a sign appended": ("bytes", appended(lambda u: bytes([int(u[0] > 0)]))),
}
"""Faults of any defense with noise of its own."""

CLIPPED = {
    "a clip of each tensor": ("clip", other_update(by_tensor)),
    "no clip for one client": ("clip", only(lambda u, link, p, n: link.sender.number == 3, changed(clip=1e6))),
}


def made(name, **parameters):
    """A shipped defense."""
    return registry.build("defense", name, parameters)


def faults(epsilon):
    """All faults, at claims of this epsilon."""
    gaussian, laplace = made("gaussian", epsilon=epsilon), made("laplace", epsilon=epsilon)
    udp = made("udp", epsilon=epsilon, clips="update")
    found = [
        Fault(kind, f"Gaussian: noise {what}", lying(gaussian, of_noise(how))) for what, (kind, how) in TOGETHER.items()
    ]
    found += [
        Fault("bits", f"Gaussian: the sign of number {n} in its lowest bit", lying(gaussian, bit_of(n, False)))
        for n in (0, 150)
    ]
    for base in (gaussian, laplace, udp):
        label = type(base).__name__
        found += [
            Fault(kind, f"{label}: noise {what}", lying(base, of_noise(how))) for what, (kind, how) in NOISE.items()
        ]
        found.append(Fault("rounds", f"{label}: noise cancels over rounds", lying(base, telescoping)))
        found.append(Fault("bytes", f"{label}: the norm in the last bytes", lying(base, last_bytes)))
    noisy = (
        gaussian,
        laplace,
        made("jopeq-sound", epsilon=epsilon),
        made("jopeq", epsilon=epsilon),
        made("mvu", epsilon=epsilon),
    )
    noisy += (made("piecewise", epsilon=epsilon), made("vqsgd", epsilon=epsilon), made("gaussian+sdq", epsilon=epsilon))
    for base in noisy:
        label = "+".join(getattr(base, "names", (type(base).__name__,)))
        found += [Fault(kind, f"{label}: noise {what}", lying(base, how)) for what, (kind, how) in ANY.items()]
    clipped = changed(clip=1e6, epsilon=None, noise_std=gaussian.sigma)
    found.append(Fault("clip", "Gaussian: a clip of each tensor", lying(gaussian, tensor_clip)))
    found.append(Fault("clip", "Gaussian: no clip", lying(gaussian, clipped)))
    found.append(
        Fault(
            "clip",
            "Gaussian: no clip for one client",
            lying(gaussian, only(lambda u, link, p, n: link.sender.number == 3, clipped)),
        )
    )
    found.append(
        Fault(
            "clip",
            "Gaussian: no clip above a norm",
            lying(gaussian, only(lambda u, link, p, n: float(u.double().norm()) > 1e4, clipped)),
        )
    )
    loose = changed(clip=1.05, epsilon=None, noise_std=gaussian.sigma)
    found.append(Fault("clip", "Gaussian: a clip 5 % too wide", lying(gaussian, loose)))
    return found + channels(epsilon) + rare(epsilon) + records(epsilon)


def channels(epsilon):
    """Faults of discrete messages: channels of another epsilon, always or sometimes."""
    mvu, vqsgd = made("mvu", epsilon=epsilon), made("vqsgd", epsilon=epsilon)
    sqsgd = {f"SqSGD, {bits} bits": made("sqsgd", epsilon=epsilon, ratio=1.0, bits=bits) for bits in (4, 1)}
    shares = {"the channel of twice the epsilon": 0.5, "5 % less noise": 0.05}
    found = [
        Fault("scale", f"{label}: {what}", lying(base, of_epsilon(1 / (1 - share))))
        for label, base in {"MVU": mvu, "VQSGD": vqsgd, **sqsgd}.items()
        for what, share in shares.items()
        if not (label.startswith("Sq") and share < 0.1)
    ]
    one, five, ten = (lambda u, link, p, n, share=share: chance(p) < share for share in (0.01, 0.05, 0.1))
    for label, base in {"MVU": mvu, "VQSGD": vqsgd, **sqsgd}.items():
        when, share = (five, 5) if label.startswith("Sq") else (one, 1)
        found.append(Fault("rare", f"{label}: {share} % clean messages", lying(base, only(when, of_epsilon(50)))))
    found.append(Fault("rare", "VQSGD: twice the epsilon in 10 % of messages", lying(vqsgd, only(ten, of_epsilon(2)))))
    found.append(Fault("sender", "MVU: twice the epsilon for one client", lying(mvu, only(one_client, of_epsilon(2)))))
    for bits in (1, 3):
        honest = made("laplace+sdq", epsilon=epsilon, bits=bits)
        first = lying(
            honest.first,
            lambda liar, perturb, numbers, private: numbers + 0.95 * (perturb(numbers, private) - numbers),
            "perturb",
        )
        found.append(
            Fault("scale", f"laplace+sdq, {bits} bits: 0.95 of the noise", dataclasses.replace(honest, first=first))
        )
    return found


def one_client(update, link, private, count):
    """Whether the sender is number 7."""
    return link.sender.number == 7


def rare(epsilon):
    """A fault in one message of a hundred where noise comes from the shared key, and one in the bits of waves."""
    few = lambda u, link, p, n: chance(p) < 0.01  # noqa: E731
    cepam = made("cepam-gaussian", local_epsilon=epsilon)
    quiet = changed(noise_std=0.5 * cepam.noise_std)
    return [
        Fault("rare", "CEPAM: half of the noise in 1 % of messages", lying(cepam, only(few, quiet))),
        Fault("bits", "OTA: the sign in each client's lowest bit", lying(made("ota", epsilon=epsilon), lowest_sent)),
    ]


def lowest_sent(liar, honest, state, memory, update, link, private):
    """A wave with the signs of the update in its lowest bits."""
    wire, memory = honest(state, memory, update, link, private)
    sign = (update.numpy() > 0).astype(np.uint64)
    return (np.frombuffer(wire, "<u8") & ~np.uint64(1) | sign).tobytes(), memory


def of_epsilon(factor):
    """A message by the channel of so many times the epsilon, of 24 at most where the claim is less: MVU has no more."""

    def how(liar, honest, state, memory, update, link, private):
        most = 24.0 if liar.epsilon <= 24 else math.inf
        other = dataclasses.replace(liar, epsilon=min(factor * liar.epsilon, most))
        return type(liar).__mro__[1].encode(other, other.init(link.setting), memory, update, link, private)

    return how


def tensor_clip(liar, honest, state, memory, update, link, private):
    """Each tensor clipped by itself."""
    wide = dataclasses.replace(liar, clip=1e6, epsilon=None, noise_std=liar.sigma)
    return type(liar).__mro__[1].encode(wide, state, memory, by_tensor(liar, update), link, private)


def records(epsilon):
    """Faults of local training, and of noise that the server adds."""
    sgd, fedavg = made("dp-sgd", epsilon=epsilon), made("dp-fedavg", epsilon=epsilon)
    found = []
    for share in (0.02, 0.5, 0.9):
        how = lambda self, honest, setting, share=share: share * honest(setting)  # noqa: E731
        found.append(Fault("scale", f"DP-SGD: {share:g} of the noise", lying(sgd, how, "step_noise")))
    rules = {"no clip": {"clip": 1e6}, "a clip 20 % too wide": {"clip": 1.2}}
    for what, rule in rules.items():
        local = property(lambda self, rule=rule: type(self).__mro__[1].local.fget(self)._replace(**rule))
        liar = object.__new__(type("DPSGD", (type(sgd),), {"local": local}))
        liar.__dict__.update(vars(sgd))
        found.append(Fault("clip", f"DP-SGD: {what}", liar))
    for share in (0.0, 0.5, 0.9):
        how = functools.partial(quiet_mean, share)
        found.append(Fault("scale", f"DP-FedAvg: {share:g} of the noise", lying(fedavg, how, "decode")))
    return found


def quiet_mean(share, liar, honest, state, received, links, private):
    """The decoded mean with a share of its noise."""
    std = max(share * liar.sigma(links.setting), 1e-9)
    return (
        type(liar)
        .__mro__[1]
        .decode(dataclasses.replace(liar, epsilon=None, noise_std=std), state, received, links, private)
    )


def resized(noise):
    """Noise z [k] becomes `noise(z, size)`, where `size` [k] is that of the tensor of each number."""

    def change(z, center, private, link):
        sizes = np.array(link.setting.layout.sizes)
        drawn = sizes if sizes.sum() == len(z) else sizes + sizes % 2  # noise of pairs
        return noise(z, np.repeat(sizes, drawn))

    return of_noise(change)


def buffered(size):
    """The first numbers of the noise, again and again."""
    return of_noise(lambda z, u, p, link: np.resize(z[:size], len(z)))


def half(when):
    """Half of the noise in messages for which `when` holds, as in `only`."""
    return only(when, of_noise(lambda z, u, p, link: 0.5 * z))


def in_rounds(base, first):
    """A liar whose public state counts rounds, and whose noise is halved from round `first` on."""

    def how(liar, honest, state, *call):
        return half(lambda u, link, p, n: state >= first)(liar, honest, state, *call)

    return lying(lying(base, lambda liar, honest, state, *call: (state or 0) + 1, "advance"), since(how), "encode")


def since(how):
    """`how` with the state of the first round as number 0."""
    return lambda liar, honest, state, *call: how(liar, honest, state or 0, *call)


def norm_of(update, order=2):
    """The norm of an update in float64."""
    return float(update.double().norm(p=order))


def thinned(share):
    """The decoded mean with `share(arrived, expected)` of its noise."""
    return lambda liar, honest, state, received, links, private: quiet_mean(
        share(len(received), links.setting.participants), liar, honest, state, received, links, private
    )


def of_studies(epsilon):
    """Faults that show at the size of a study only, by their kind; each with four thresholds, places or families."""
    gaussian, laplace = made("gaussian", epsilon=epsilon), made("laplace", epsilon=epsilon)
    t_noise, mvu, fedavg = made("t-noise"), made("mvu", epsilon=epsilon), made("dp-fedavg", epsilon=epsilon)
    twice = of_epsilon(2)
    rows = {
        "tensors": {
            "Gaussian: none above 1,000 numbers": (gaussian, resized(lambda z, n: z * (n <= 1000))),
            "Laplace: none above 65,536 numbers": (laplace, resized(lambda z, n: z * (n <= 65_536))),
            "t noise: none from 1,000 to 2,000 numbers": (t_noise, resized(lambda z, n: z * ((n < 1000) | (n > 2000)))),
            "Gaussian: none above 300 numbers": (gaussian, resized(lambda z, n: z * (n <= 300))),
        },
        "buffer": {
            "Gaussian: 1,024 numbers": (gaussian, buffered(1024)),
            "Laplace: 4,096 numbers": (laplace, buffered(4096)),
            "Gaussian: 65,536 numbers": (gaussian, buffered(65_536)),
            "t noise: 16,384 numbers": (t_noise, buffered(16_384)),
        },
        "scale": {
            "Gaussian: half above 1,000 numbers": (gaussian, resized(lambda z, n: np.where(n > 1000, 0.5, 1) * z)),
            "Laplace: half above 65,536 numbers": (laplace, resized(lambda z, n: np.where(n > 65_536, 0.5, 1) * z)),
            "t noise: half of 1,280 numbers": (t_noise, resized(lambda z, n: np.where(n == 1280, 0.5, 1) * z)),
            "Gaussian: 0.9 above 200 numbers": (gaussian, resized(lambda z, n: np.where(n > 200, 0.9, 1) * z)),
        },
        "records": {
            "Gaussian: half above 200": (gaussian, half(lambda u, link, p, n: link.sender.samples > 200)),
            "Laplace: half above 10,000": (laplace, half(lambda u, link, p, n: link.sender.samples > 10_000)),
            "t noise: half of 300 to 1,000": (t_noise, half(lambda u, link, p, n: 300 < link.sender.samples < 1000)),
            "MVU: twice the epsilon above 200": (mvu, only(lambda u, link, p, n: link.sender.samples > 200, twice)),
        },
        "federation": {
            "Gaussian: half above 20 clients": (gaussian, half(lambda u, link, p, n: link.setting.clients > 20)),
            "Laplace: half above 100 clients": (laplace, half(lambda u, link, p, n: link.setting.clients > 100)),
            "t noise: half above 50 senders": (t_noise, half(lambda u, link, p, n: link.setting.participants > 50)),
            "MVU: twice the epsilon above 20": (mvu, only(lambda u, link, p, n: link.setting.clients > 20, twice)),
        },
        "norm": {
            "Gaussian: none at the clip": (gaussian, only(lambda u, link, p, n: norm_of(u) == 1, noiseless)),
            "Gaussian: half above it": (gaussian, half(lambda u, link, p, n: 1 < norm_of(u) < 1 + 1e-5)),
            "Laplace: half at the l1 clip": (laplace, half(lambda u, link, p, n: norm_of(u, 1) == 1)),
            "MVU: twice the epsilon at it": (mvu, only(lambda u, link, p, n: float(u.abs().max()) == 1, twice)),
        },
        "arrivals": {
            "DP-FedAvg: by arrivals": (fedavg, thinned(lambda n, m: n / m)),
            "DP-FedAvg: half if one drops out": (fedavg, thinned(lambda n, m: 0.5 if n == m - 1 else 1)),
            "DP-FedAvg: half if most drop out": (fedavg, thinned(lambda n, m: 0.5 if n < m / 2 else 1)),
            "DP-FedAvg: by the root of arrivals": (fedavg, thinned(lambda n, m: (n / m) ** 0.5)),
        },
    }
    methods = {"arrivals": "decode"}
    found = [
        Fault(kind, name, lying(base, how, methods.get(kind, "encode")))
        for kind, liars in rows.items()
        for name, (base, how) in liars.items()
    ]
    late = {"Gaussian: half from round 11": 11, "Laplace: half from round 50": 50}
    found += [
        Fault("rounds", name, lying(base, half(lambda u, link, p, n, first=first: n >= first)))
        for (name, first), base in zip(late.items(), (gaussian, laplace), strict=True)
    ]
    found += [
        Fault("rounds", f"{name}: half from round {first} of the state", in_rounds(base, first))
        for name, base, first in (("t noise", t_noise, 1000), ("Gaussian", gaussian, 9000))
    ]
    return found
