"""How much text is read: undefended, by network and batch, and behind defenses, beside the floor.

`exact`: gradients without a defense, 2,000 tokens; `trained`: batches of 4 after 60 or 200 rounds; `behind`: single
texts of 16 of 1,000 tokens behind defenses. Texts are Python's help; victims, attacker and other clients have different
ones. Prints words, ROUGE-2 with its 95 % interval, the share of texts that are exactly right, n, and processor seconds
for a victim, the first of which pays for the start.

Where the published span check fails, it stands beside: it draws texts for as long as `tokens` takes.

    python benchmarks/texts.py [--only TABLE] [--seeds 0,1]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from _cells import attacked
from torch import Tensor, nn

from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._text.network import Network, Site
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Guess, Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import DataSet
from leakgauge.harness.data.sequences import help_texts, help_without_labels
from leakgauge.harness.learn.language import Decoder, Encoder
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.study import resolve

STILL = {"clients": 10, "rounds": 1, "algorithm": "fedsgd", "batch": 0, "samples": 1000, "test_samples": 300}
TRAINED = {**STILL, "batch": 32, "rounds": 60, "lr": 0.05}
PREDICTS = {**TRAINED, "batch": 6, "rounds": 200, "lr": 0.5}  # a test loss below that of the tokens' frequencies


def long_texts() -> DataSet:
    """Texts of 64 of 2,000 tokens."""
    return help_texts(Path(), 64, 2000)


def many_words() -> DataSet:
    """Texts of 16 of 2,000 tokens."""
    return help_texts(Path(), 16, 2000)


def next_words() -> DataSet:
    """The same without labels."""
    return help_without_labels(Path(), 16, 2000)


def network(make: type[Decoder | Encoder], width: int, vocabulary: int, input_shape: Any, classes: int) -> nn.Module:
    """A network of this width."""
    return make(vocabulary, input_shape, classes, width)


# distances from the spans of the first and the second layer; the first ones are the published ones
_BOUNDS = [(first, second) for first in (1e-5, 1e-4, 1e-3) for second in (1e-3, 1e-2)]
_MOST = 512  # texts that are kept, or drawn at once


@dataclass(frozen=True)
class Published(Attack):
    """The span check of texts without a defense, with the published thresholds or larger ones, whichever fit best.

    Tokens of a place are those whose first hidden state lies in the span of the first layer's gradient. Decoders extend
    prefixes by the second layer; encoders try products of the places' tokens, at random, until the time is over.

    Source: Petrov et al. 2024, "DAGER: exact gradient inversion for large language models", algorithms 1 and 2.
    """

    kind: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models", "labels"})
    forms: ClassVar[frozenset[str]] = frozenset({"tokens"})

    seconds: float = 30.0

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Ids and the granted labels."""
        task, params = seen.task, seen.observed_rounds[0].model.params
        assert isinstance(task, ModelTask)
        assert seen.labels is not None
        network, guesses = Network.of(task, params), []
        for number, (gradient, y) in enumerate(zip(received_gradients(seen, numbers=True), seen.labels, strict=True)):
            x = self._read(network, params, task.layout.split(gradient), len(y), key.child(number))
            guesses.append(Guess(x.float(), y, 0.0, 0))
        return Reconstruction(tuple(guesses))

    def _read(self, network: Network, params: Tensor, tensors: list[Tensor], b: int, key: Key) -> Tensor:
        """[b, T] ids."""
        start, length = time.process_time(), network.task.input_shape[0]
        first, second = (
            next(site for site in network.sites if site.source.path == f"blocks.{n}.self_attn") for n in (0, 1)
        )
        pool = tensors[network.words].any(1).nonzero()[:, 0]
        near = _distance(network, params, first, tensors, pool[:, None].repeat(1, length)).T
        if second.causal:
            every = [self._extended(network, params, tensors, pool, near, second, b, *bounds) for bounds in _BOUNDS]
            return min(every, key=lambda x: float(_distance(network, params, second, tensors, x).mean()))
        places = [pool[off.argsort()[: max(1, int((off < _BOUNDS[-1][0]).sum()))]] for off in near]
        best, found, turn = torch.zeros(0), pool.new_zeros(0, length), 0
        while turn == 0 or time.process_time() - start < self.seconds:
            draws = rng.uniform(key.child(turn), (_MOST, length))
            drawn = torch.stack([p[(u * len(p)).long() % len(p)] for u, p in zip(draws.T, places, strict=True)], 1)
            found = torch.cat([found, drawn])
            best = torch.cat([best, _distance(network, params, second, tensors, drawn).mean(1)])
            kept = best.argsort()[:b]
            best, found, turn = best[kept], found[kept], turn + 1
        return found

    def _extended(
        self,
        network: Network,
        params: Tensor,
        tensors: list[Tensor],
        pool: Tensor,
        near: Tensor,
        second: Site,
        b: int,
        *bounds: float,
    ) -> Tensor:
        """[b, T] ids of the prefixes that lie in the second span at every place; near: [T, C] from the first."""
        texts = pool.new_zeros(1, 0)
        for off in near:
            tokens = pool[off.argsort()[: max(b, int((off < bounds[0]).sum()))]]
            texts = torch.cat([texts.repeat_interleave(len(tokens), 0), tokens.repeat(len(texts))[:, None]], 1)
            rest = texts[:, -1:].expand(-1, len(near) - texts.shape[1])
            away = _distance(network, params, second, tensors, torch.cat([texts, rest], 1))[:, texts.shape[1] - 1]
            texts = texts[away.argsort()[: min(_MOST, max(b, int((away < bounds[1]).sum())))]]
        return texts[torch.arange(b) % len(texts)]


def _distance(network: Network, params: Tensor, site: Site, tensors: list[Tensor], x: Tensor) -> Tensor:
    """[n, T] relative distances of hidden states from the span of a site's gradient."""
    rows = site.rows(tensors)
    _, values, right = torch.linalg.svd(rows.double(), full_matrices=False)
    basis = right[values > max(rows.shape) * torch.finfo(rows.dtype).eps * values[0]].float()
    parts = [network.states(params, part, [site])[0] for part in torch.split(x, 64)]
    states = torch.cat([h / h.norm(dim=-1, keepdim=True) for h in parts])
    off: Tensor = (states - states @ basis.T @ basis).norm(dim=-1)
    return off


decoder, encoder = partial(network, Decoder, 128), partial(network, Encoder, 128)
wide_decoder = partial(network, Decoder, 256)

EXACT = [
    ("many_words", "encoder", 1, 8),
    ("many_words", "decoder", 1, 8),
    ("long_texts", "decoder", 1, 8),
    ("many_words", "decoder", 4, 4),
    ("many_words", "wide_decoder", 8, 4),
    ("many_words", "encoder", 4, 4),
    ("next_words", "decoder", 4, 4),
    ("next_words", "wide_decoder", 16, 1),
]
BEHIND: list[dict[str, Any]] = [
    {"name": "top-k"},
    {"name": "jopeq", "epsilon": [4.0, 2.0, 1.0]},
    {"name": "laplace"},
    {"name": "cepam-gaussian"},
    {"name": "gaussian", "epsilon": [8.0, 1000.0]},
]


def studies() -> dict[str, list[dict[str, Any]]]:
    """The studies of each table."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in ("exact", "trained"):
        tables[name] = []
        for data, model, batch, count in EXACT:
            if name == "trained" and batch != 4:
                continue
            federation = STILL if name == "exact" else PREDICTS if data == "next_words" else TRAINED
            target = {"count": count, "batch": batch, "round": federation["rounds"] - 1}
            tables[name].append(
                {
                    "tasks": [{"data": f"texts:{data}", "model": f"texts:{model}"}],
                    "federations": [federation],
                    "defenses": [{"name": "none"}],
                    "attacks": [
                        {"name": attack, "threat": threat, "target": target}
                        for attack, threat in (("tokens", "server"), ("texts:Published", "server+labels"))
                    ],
                }
            )
    tables["behind"] = [
        {
            "tasks": [{"data": "help", "model": "text-encoder"}],
            "federations": [STILL],
            "defenses": BEHIND,
            "attacks": [
                {"name": "tokens", "target": {"count": 50}},
                {"name": "prior", "target": {"count": 50}, "guess": "majority"},
            ],
        }
    ]
    return tables


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="print only this table")
    parser.add_argument("--seeds", default="0", help="seeds, separated by commas")
    given = parser.parse_args()
    shared = {"seeds": [*map(int, given.seeds.split(","))], "limit": False, "lineup": False}
    for name, tables in studies().items():
        for parts in tables if given.only in ("", name) else ():
            study = resolve({"name": name, **shared, **parts}, allow_code=True)
            for cell, found, seconds in attacked(study, Path()):
                task, pairs = cell.training.task, found["rouge2"]
                label = f"{cell.training.defense.name} {cell.training.defense.parameters.get('epsilon', '')}"
                where = f"{task.data} {task.model} batch {cell.target.batch}, {cell.attack.name}"
                rate = f"words {found['words'].value:.3f}, ROUGE-2 {pairs.value:.3f} [{pairs.low}, {pairs.high}]"
                exact = f"exact {found['exact_text'].value:.3f}, n = {pairs.n}, {seconds:.2f} s"
                print(f"{name:<8} {label:<20} {where:<50} {rate}, {exact}", flush=True)


if __name__ == "__main__":
    main()
