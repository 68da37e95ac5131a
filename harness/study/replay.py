"""The part of a training that the attacks need, models and messages, as arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core.claim import Breach
from leakgauge.harness.core.contract import Feedback, Message, Sender, Setting
from leakgauge.harness.core.result import TrainingRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.loop import Keep, Training
from leakgauge.harness.federation.round import client_key
from leakgauge.harness.study.store import Arrays


def to_arrays(training: Training, keep: Keep) -> Arrays:
    """The arrays of a training. Shared keys are not stored, because the seed determines them."""
    losses = [training.feedback[0].before, *(item.after for item in training.feedback)]
    arrays: dict[str, npt.NDArray[Any]] = {
        # the requested rounds: after a defense has stopped, a round has no model and no messages
        "asked": np.array(sorted(keep.messages), np.int64),
        "asked models": np.array(sorted(keep.models), np.int64),
        "final": training.final.numpy(),
        "learning_rates": np.array(training.learning_rates),
        # before the first round, and after each; NaN: not evaluated
        "losses": np.array([np.nan if loss is None else loss for loss in losses]),
    }
    for number, params in training.models.items():
        arrays[f"model {number}"] = params.numpy()
    for number, messages in training.messages.items():
        arrays[f"wires {number}"] = np.frombuffer(b"".join(message.wire for message in messages), np.uint8)
        senders = [(*m.sender, len(m.wire), m.images, m.steps) for m in messages]
        arrays[f"senders {number}"] = np.array(senders, np.int64).reshape(-1, 5)
        others = [(i, *other) for i, message in enumerate(messages) for other in message.others]
        arrays[f"others {number}"] = np.array(others, np.int64).reshape(-1, 3)
        for sender, samples in training.truth[number].items():
            arrays[f"truth {number} {sender}"] = samples
    return arrays


def holds(arrays: Arrays, keep: Keep) -> bool:
    """Whether the arrays contain the requested rounds; False for arrays of another version."""
    if "asked" not in arrays or "asked models" not in arrays:
        return False
    return keep.messages <= set(arrays["asked"].tolist()) and keep.models <= set(arrays["asked models"].tolist())


def from_arrays(arrays: Arrays, setting: Setting, record: TrainingRecord, key: Key | None) -> Training:
    """The training that `to_arrays` stored; `key` is the key of the training, None: the shared keys are unknown."""
    losses = [None if np.isnan(loss) else float(loss) for loss in arrays["losses"]]
    training = Training(
        setting,
        torch.from_numpy(arrays["final"]),
        evaluations=list(record.evaluations),
        learning_rates=[float(lr) for lr in arrays["learning_rates"]],
        feedback=[Feedback(number, *pair) for number, pair in enumerate(itertools.pairwise(losses))],
        message_bytes=list(record.message_bytes),
        snr_db=list(record.snr_db),
        breaches={one.assumption: Breach(one.broken, one.of, one.what, one.covered) for one in record.breaches},
        dropped=list(record.dropped),
    )
    for name, array in arrays.items():
        kind, _, rest = name.partition(" ")
        if kind == "model":
            training.models[int(rest)] = torch.from_numpy(array)
        elif kind == "truth":
            number, sender = map(int, rest.split())
            training.truth.setdefault(number, {})[sender] = array
        elif kind == "senders":
            wires, others = arrays[f"wires {rest}"].tobytes(), arrays[f"others {rest}"]
            training.truth.setdefault(int(rest), {})
            training.messages[int(rest)] = _messages(int(rest), array, others, wires, key)
    return training


def _messages(
    number: int, senders: npt.NDArray[Any], others: npt.NDArray[Any], wires: bytes, key: Key | None
) -> tuple[Message, ...]:
    """The messages of one round from their joined bytes; others: [k, 3] index of the message, sender, samples."""
    ends = np.cumsum(senders[:, 2])
    return tuple(
        Message(
            number,
            Sender(int(sender), int(samples)),
            wires[end - length : end],
            key and client_key(key, number, int(sender)).child("shared"),
            int(images),
            int(steps),
            tuple(Sender(int(k), int(n)) for index, k, n in others if index == i),
        )
        for i, ((sender, samples, length, images, steps), end) in enumerate(zip(senders, ends, strict=True))
    )
