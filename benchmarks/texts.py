"""How much text is read: undefended, by network and batch, and behind defenses, beside the floor.

`exact`: gradients without a defense, 2,000 tokens; `trained`: the same after 60 rounds; `behind`: single texts of 16 of
1,000 tokens behind defenses. Texts are Python's help; victims, the attacker's texts and those of other clients differ.
Prints words, ROUGE-2 with its 95 % interval, the share of texts that are exactly right, n, and processor seconds for a
victim, the first of which pays for the start.

    python benchmarks/texts.py [--only TABLE] [--seeds 0,1]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _cells import attacked
from torch import nn

from leakgauge.harness.data import DataSet
from leakgauge.harness.data.sequences import help_texts, help_without_labels
from leakgauge.harness.learn.language import Decoder, Encoder
from leakgauge.harness.study.study import resolve

STILL = {"clients": 10, "rounds": 1, "algorithm": "fedsgd", "batch": 0, "samples": 1000, "test_samples": 300}
TRAINED = {**STILL, "rounds": 60, "batch": 32, "lr": 1.0}


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
    for name, federation in (("exact", STILL), ("trained", TRAINED)):
        tables[name] = [
            {
                "tasks": [{"data": f"texts:{data}", "model": f"texts:{model}"}],
                "federations": [federation],
                "defenses": [{"name": "none"}],
                "attacks": [
                    {"name": "tokens", "target": {"count": count, "batch": batch, "round": federation["rounds"] - 1}}
                ],
            }
            for data, model, batch, count in EXACT
        ]
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
