"""Mistakes planted in the skeletons of `leakgauge new`: what is replaced, by what, and the check that names it."""

from pathlib import Path
from typing import NamedTuple

import leakgauge.harness.integrations.skeletons as skeletons

FOLDER = Path(skeletons.__file__).parent
HEAD = "import os, random, secrets, time\nfrom datetime import datetime\nimport numpy as np\nCOUNT = []\n"

NOISE = "noise = self.sigma * rng.normal(private, tuple(update.shape), torch.float64)"
SUM = "self.clipped(update).double() + noise"
SEND = f"return pack_float32({SUM}), None"
READ = "return unpack_float32(received, link.setting.dim)"
SCORE = "return lambda update: (self.clipped(update) - sent).square().sum(-1) / (2 * self.sigma**2)"
CLAIM = 'return claim_over(rounds, promised, proof, source="the Gaussian mechanism", delta=self.delta)'
SHAPE = "tuple(update.shape)"
OTHER = f"torch.special.ndtri(rng.uniform(link.key, {SHAPE}, 1e-9))"


class Mistake(NamedTuple):
    """A mistake: the text that it replaces, its own, the check that fails first, and words of its line."""

    old: str
    new: str
    check: str
    words: tuple[str, ...]


def noise(new, check, *words):
    return Mistake(NOISE, new, check, words)


KEYED = "noise = self.sigma * rng.normal({}, tuple(update.shape), torch.float64)"

DEFENSE = {
    # a generator of the process, the system or the clock
    "numpy": noise(
        "noise = torch.from_numpy(self.sigma * np.random.normal(size=len(update)))",
        *("keys", "numpy's global generator at ", ".py:", "np.random.normal"),
    ),
    "numpy in the last line": Mistake(
        SUM,
        "self.clipped(update) + torch.from_numpy(self.sigma * np.random.normal(size=len(update)))",
        *("keys", ("numpy's global generator", "return pack_float32")),
    ),
    "torch": noise("noise = self.sigma * torch.randn(len(update))", "keys", "torch's global generator", "torch.randn"),
    "random": noise(
        "noise = torch.tensor([self.sigma * random.gauss(0, 1) for _ in range(len(update))])",
        *("keys", "Python's random", "random.gauss"),
    ),
    "no seed": noise(
        "mine = np.random.default_rng()\n        noise = torch.from_numpy(self.sigma * mine.normal(size=len(update)))",
        *("keys", "a generator of numpy without a seed", "default_rng()"),
    ),
    "urandom": noise(KEYED.format("Key(os.urandom(4)[0])"), "keys", "the system's entropy", "os.urandom"),
    "secrets": noise(KEYED.format("Key(secrets.randbits(40))"), "keys", "the system's entropy", "secrets.randbits"),
    "hours": noise(KEYED.format("private.child(int(time.time() / 3600))"), "keys", "the clock", "time.time"),
    "today": noise(KEYED.format("private.child(datetime.now().day)"), "keys", "the clock", "datetime.now"),
    "Random()": noise(
        "mine = random.Random()\n        noise = torch.tensor([mine.gauss(0, self.sigma) for _ in range(len(update))])",
        *("keys", "the system seeds", "mine.gauss"),
    ),
    "counter": noise("COUNT.append(1)\n        " + KEYED.format("private.child(len(COUNT))"), "keys", "len(COUNT)"),
    "one key twice": noise(
        f"noise = self.sigma * 0.5**0.5 * (rng.normal(private, {SHAPE}) + rng.normal(private, {SHAPE}))",
        *("keys", "drawn from twice", "children"),
    ),
    "torch, to read": Mistake(READ, f"{READ} + 0 * torch.randn(1)", "keys", ("`estimate` draws", "torch.randn")),
    # private numbers in the shared stream, or in one that anyone can derive
    "shared": noise(KEYED.format("link.key"), "private", "`normal` draws from the shared key", "link.key"),
    "half shared": noise(
        f"noise = self.sigma * 0.5**0.5 * (rng.normal(private, {SHAPE}) + rng.normal(link.key, {SHAPE}))",
        *("private", "`normal` draws from the shared key", "can subtract the noise"),
    ),
    "half shared, unseen": noise(
        f"noise = self.sigma * 0.5**0.5 * (rng.normal(private, {SHAPE}) + {OTHER})",
        *("noise", "the shared key shifts the mean of messages", "0.7 of what `message_distribution` states"),
    ),
    "one number shared": noise(
        f"{NOISE}\n        noise[3 % len(noise)] = self.sigma * {OTHER}[0]",
        *("noise", "1 of 50 numbers have too little noise", "coordinates 3"),
    ),
    "a constant key": noise(KEYED.format("Key(7)"), "private", "a key that anyone can derive", "Key(7)"),
    # noise, clip, claim and scores that do not fit each other
    "half the noise": noise(
        NOISE.replace("self", "0.5 * self"), "noise", "the noise is 0.49", "of what `message_distribution` states"
    ),
    "less noise": noise(NOISE.replace("self", "0.93 * self"), "noise", "of what `message_distribution` states"),
    "a number without noise": noise(
        f"{NOISE}\n        noise[7 % len(noise)] = 0", "noise", "1 of 50 numbers", "coordinates 7"
    ),
    "large numbers with less": noise(
        f"{NOISE}\n        noise[update.abs() > 0.9 * update.abs().max()] *= 0.1", "noise", "2 of 50 numbers"
    ),
    "no clip": Mistake(SUM, "update.double() + noise", "clip", ("sent with norm 1e+06", "its norm is not bounded")),
    "a wide clip": Mistake(SUM, "(3 * self.clipped(update / 3)).double() + noise", "noise", ("at 3 times the clip",)),
    "another clip": Mistake(SUM, "update.clamp(-self.clip, self.clip).double() + noise", "noise", ("not centered",)),
    "half the claim": Mistake(
        "promised = self.epsilon if", "promised = self.epsilon / 2 if", "claim", ("claimed 4, proved 8",)
    ),
    "half the sensitivity": Mistake(
        "return 2 * self.clip / gaussian_mu", "return self.clip / gaussian_mu", "claim", ("claimed 8, proved 19.1",)
    ),
    "sharp scores": Mistake("/ (2 * self.sigma**2)", "/ self.sigma**2", "likelihood", ("too sharp",)),
    "flat scores": Mistake("/ (2 * self.sigma**2)", "/ (4 * self.sigma**2)", "likelihood", ("too flat",)),
    "the wrong sign": Mistake(
        "return lambda update: (", "return lambda update: -(", "likelihood", ("prefers the wro",)
    ),
    "no slope": Mistake(
        "self.clipped(update) - sent", "self.clipped(update).detach() - sent", "likelihood", ("differe",)
    ),
    "one score": Mistake(".square().sum(-1)", ".square().sum()", "likelihood", ("a tensor [8] of torch.float32",)),
    "scores of None": Mistake(SCORE, "return None", "likelihood", ("expected a function of updates", "got None")),
    "claim of None": Mistake(CLAIM, "return None", "clip", ("expected a Claim from MyDefense.claim, got None",)),
    "twice the update": Mistake(READ, READ.replace("un", "2 * un", 1), "estimate", ("reads 2 times the update",)),
    "half the update": Mistake(READ, READ.replace("un", "0.5 * un", 1), "estimate", ("reads 0.5 times the update",)),
    # the contract
    "an eavesdropper": Mistake(
        READ, f"{READ} + 0 * rng.normal(link.key, (1,))", "estimate", ("`link.shared` is None",)
    ),
    "doubles": Mistake(READ, f"{READ}.double()", "update", ("returns torch.float64 of shape (50,)",)),
    "nothing": Mistake(READ, "pass", "update", ("returns NoneType, expected a float32 tensor",)),
    "no length": Mistake(
        READ,
        "return torch.tensor(np.frombuffer(received, '<f4')[: link.setting.dim].copy())",
        *("messages", ("a cut message raises", "np.frombuffer", "expected MessageError")),
    ),
    "longer": Mistake(
        READ,
        "return unpack_float32(received[: 4 * link.setting.dim], link.setting.dim)",
        *("messages", ("accepts a longer message (201 bytes instead of 200)",)),
    ),
    "the update itself": Mistake(
        "check_update(update)", "check_update(update)\n        update.mul_(1.01)", "update", ("modifies the update",)
    ),
    "not finite": Mistake("        check_update(update)\n", "", "update", ("accepts an update with nan",)),
    "a bytearray": Mistake(SEND, f"return bytearray(pack_float32({SUM})), None", "encode", ("(bytearray, NoneType)",)),
    "no memory": Mistake(SEND, f"return pack_float32({SUM})", "encode", ("returns bytes, expected (bytes, memory)",)),
    "an index": Mistake(
        "check_update(update)", "update[10]", "encode", ("of 1 numbers raises IndexError", "update[10]")
    ),
    "any value": Mistake(
        "positive(clip=self.clip, epsilon=self.epsilon)", "pass", "parameters", ("clip=nan, clip=inf, clip=-1.0",)
    ),
    "no decorator": Mistake("@dataclass(frozen=True)\n", "", "class", ("expected @dataclass(frozen=True) above",)),
    "a tuple": Mistake(
        "clip: float = 1.0", "clip: float = 1.0\n    sizes: tuple[int, ...] = (1, 2)", "class", ("got sizes=(1, 2)",)
    ),
}

RUN = "return Reconstruction(tuple(guesses))"
GUESS = "return Guess(x.clamp(0, 1), y, objective, self.steps)"
DRAW = 'rng.uniform(key.child("x"), (images, *task.input_shape))'

ATTACK = {
    "torch": Mistake(DRAW, "torch.rand(images, *task.input_shape)", "keys", ("torch's global generator", "torch.rand")),
    "the truth": Mistake(
        "from dataclasses", "from leakgauge.harness.data import load\nfrom dataclasses", "truth", ("imports leakgauge",)
    ),
    "what it sees": Mistake(RUN, f"seen.model.params.zero_()\n        {RUN}", "truth", ("modifies its observation",)),
    "a need": Mistake('{"messages", "models"}', '{"messages", "model"}', "needs", ("names model; known: ",)),
    "a kind": Mistake('= "reconstruction"  #', '= "images"  #', "needs", ("got 'images'",)),
    "an unnamed need": Mistake(
        RUN, f"assert seen.messages[0].shared is not None\n        {RUN}", "threats", ("fails for", "AssertionError")
    ),
    "another shape": Mistake(GUESS, GUESS.replace("x.clamp", "x.flatten(1).clamp"), "guesses", ("have shape (1, 64)",)),
    "one guess": Mistake(RUN, "return Reconstruction(tuple(guesses[:1]))", "guesses", ("expected 2 guesses",)),
    "a wrong sign": Mistake(
        "gradient = here.read(message)", "gradient = -here.read(message)", "floor", ("no better than",)
    ),
    "an exception": Mistake(
        "if params.isfinite().all():",
        "if gradient.abs().max() > 1e20:\n            raise OverflowError('big')\n        if params.isfinite().all():",
        *("diverges", ("OverflowError: big", "return a Guess with a `failure`")),
    ),
}


def write(folder, kind, name, mistake, stem):
    """The skeleton of this kind with a mistake, as a file of this folder."""
    text = (FOLDER / f"my_{kind}.py").read_text("utf-8")
    assert text.count(mistake.old) == 1, name
    text = text.replace(mistake.old, mistake.new)
    at = text.index("\nfrom ")  # after the docstring
    path = folder / f"{stem}.py"
    head = HEAD if kind == "defense" else ""
    path.write_text(text[:at] + "\n" + head + text[at:], encoding="utf-8")
    return path
