"""The verdict on each mechanism that Flower and NVFlare ship: `python benchmarks/deployed.py` writes docs/deployed.md.

About six minutes on one core. Defaults are those of the packages; where a package has none, those of the source that
the row names.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the sources of this checkout

from bench import between  # noqa: E402

import leakgauge  # noqa: E402
from leakgauge.deployed import flower_adaptive  # noqa: E402

PAGE = ROOT / "docs" / "deployed.md"
BEGIN = "<!-- made by python benchmarks/deployed.py -->\n"
_D, _CLIENTS = 36, 20


class Row(NamedTuple):
    """A mechanism; `given` and `more` are the arguments of `leakgauge.claim` and further ones of `leakgauge.audit`.

    claims: whether the package states an epsilon. only: when the proof holds; empty: always.
    """

    name: str
    defaults: str
    defense: str
    parameters: dict[str, Any]
    claims: bool
    why: str
    setting: tuple[tuple[str, int], ...] = ()
    rounds: int = 1
    threat: str | None = None
    only: str = ""

    @property
    def asked(self) -> tuple[str, dict[str, Any], dict[str, Any], int]:
        """The arguments of `leakgauge.claim` and `leakgauge.audit`."""
        return self.defense, self.parameters, {"dim": _D, **dict(self.setting)}, self.rounds


def function(name: str) -> str:
    """The name of one of our functions as a defense."""
    return f"function:leakgauge.deployed.{name}"


_ADAPTIVE = flower_adaptive(1.0, _CLIENTS)
_EQUAL = (("clients", _CLIENTS), ("participants", _CLIENTS))
ROWS = [
    Row(
        "Flower `LocalDpMod`",
        "none; as common in apps: clip 1, sensitivity 1, epsilon 1, delta 1e-5",
        function("flower_local_dp"),
        {},
        True,
        "Two clipped updates are 2 clips apart, not `sensitivity`; with sensitivity 2 and an epsilon below 1 it would"
        " hold.",
    ),
    Row(
        "Flower `LocalDpMod`, as a hospital platform sets it",
        "clip 1, sensitivity 1e-4, epsilon 10, delta 1e-5",
        function("flower_local_dp"),
        {"sensitivity": 1e-4, "epsilon": 10.0},
        True,
        "The noise is 1/20,641 of the clip: the update can be read.",
    ),
    Row(
        "Flower `fixedclipping_mod`, `adaptiveclipping_mod`: the message",
        "none; here clip 0.1",
        function("flower_clipping"),
        {},
        False,
        "The clip alone hides nothing from those who see messages; with clipping on the server, the update is sent as"
        " it is.",
    ),
    Row(
        "Flower `DifferentialPrivacy{Server,Client}SideFixedClipping`: the models",
        "none; as in Flower's `fl-dp-sa`: noise multiplier 0.2, clip 10, 20 clients a round, 3 rounds",
        "dp-fedavg",
        {"clip": 10.0, "noise_std": 2.0},
        False,
        "It is `dp-fedavg` with `noise_std` zC if clients have equal weights; a client with a share w of the weights"
        " needs 20 w times the noise, and `FedAvg` weights by examples. Its new accountant states an epsilon, by Renyi"
        " DP, which is larger than ours.",
        _EQUAL,
        3,
    ),
    Row(
        "Flower `DifferentialPrivacy{Server,Client}SideAdaptiveClipping`: the models",
        "first clip 0.1, quantile 0.5, rate 0.2, count noise 1/20 of the clients; noise multiplier 1, 20 clients",
        "dp-fedavg",
        {"clip": 0.1, "noise_std": 0.1 * _ADAPTIVE.effective},
        False,
        f"Noise is added for the clip after it moved: if it cuts all, multiplier 1 is {_ADAPTIVE.effective:.3f}, and"
        " this `dp-fedavg` is audited. The clip moves the wrong way: it shrinks if it cuts all, and grows if it cuts"
        " none. Weights as above.",
        _EQUAL,
        only="in a round whose clip shrinks by 10 %: ",
    ),
    Row(
        "Flower `DPFedAvgFixed` (older API, deprecated): the models",
        "noise multiplier 1, noise by the server; no default clip, here 0.1; 20 clients",
        "dp-fedavg",
        {"clip": 0.1, "noise_std": 0.1},
        False,
        "Each client's parameters get noise of zC / sqrt(clients), and the mean has equal weights: it is `dp-fedavg`"
        " with `noise_std` zC if all clients answer, with less if fewer do. Clients clip themselves, and the server"
        " checks no norm.",
        _EQUAL,
    ),
    Row(
        "Flower `DPFedAvgFixed` with `server_side_noising=False`: the message",
        "noise multiplier 1; no default clip, here 0.1; 20 clients",
        "gaussian",
        {"clip": 0.1, "noise_std": 0.1 / math.sqrt(_CLIENTS)},
        False,
        "A client adds only its share of the noise, 1/4.5 of the clip, so its message hides little. The server then"
        " adds its own noise all the same: the models have twice the variance of the row above.",
    ),
    Row(
        "Flower `DPFedAvgAdaptive` (older API, deprecated): the models",
        "first clip 0.1, quantile 0.5, rate 0.2, count noise 1/20 of the clients; noise multiplier 1, 20 clients",
        "dp-fedavg",
        {"clip": 0.1, "noise_std": 0.1 * flower_adaptive(1.0, _CLIENTS, rate=0.0).effective},
        False,
        "The multiplier is split between count and sum as in the source, noise is added for the clip that was used, and"
        " the clip moves the right way: multiplier 1 is 1 in each round, whatever the clip. Clients clip themselves and"
        " state whether they did.",
        _EQUAL,
    ),
    Row(
        "Flower SecAgg+ (`SecAggPlusWorkflow`)",
        "numbers in [-8, 8] on 2^22 levels",
        function("flower_secagg"),
        {},
        False,
        "Single messages are hidden from the server by cryptography, which is not examined here; the sum has no noise."
        " The adversary is the `aggregator`.",
        threat="aggregator",
    ),
    Row(
        "NVFlare `PercentilePrivacy`",
        "percentile 10, gamma 0.01",
        function("nvflare_percentile"),
        {},
        False,
        "There is no noise: the largest 90 % of the numbers are sent, clamped.",
    ),
    Row(
        "NVFlare `SVTPrivacy`",
        "fraction 0.1, epsilon 0.1, noise_var 0.1, gamma 1e-5, tau 1e-6",
        function("nvflare_svt"),
        {"epsilon": 0.5},
        True,
        "Its accountant states 0.1 + 0.1 n for the n numbers sent: here 4 of 36; 10,000 for a million parameters. It"
        " does not stop at n numbers above the threshold, where other variants leak (Lyu et al. 2017), but draws n of"
        " them, which bounds what they tell: `nvflare_svt` has the proof, which an audit cannot follow, and tests"
        " compute it for small updates. Scalars are sent as they are. At these defaults little is sent besides noise.",
    ),
    Row(
        "NVFlare `ExcludeVars`",
        "nothing is excluded",
        function("nvflare_exclude_vars"),
        {},
        False,
        "What is not excluded is sent as it is.",
    ),
    Row(
        "NVFlare `GaussianPrivacy` (research code)",
        "sigma0 0.1, max_percentile 95",
        function("nvflare_gaussian"),
        {},
        False,
        "The noise follows a percentile of the private update, which nothing bounds, so no epsilon follows.",
    ),
]


def _epsilon(record: dict[str, Any]) -> str:
    if record["epsilon"] in (None, "inf"):
        return "infinite"
    delta = f", {record['delta']:g}" if record["delta"] else ", 0"
    return f"({record['epsilon']:.4g}{delta}) per {record['unit']}"


def front(row: Row) -> str:
    """The first cells of a row: name, defaults, claimed, proved. They follow from the claim alone."""
    answer = leakgauge.claim(*row.asked, None)
    claimed = _epsilon(answer["claimed"]) if row.claims else "none"
    return f"| {row.name} | {row.defaults} | {claimed} | {row.only}{_epsilon(answer['proved'])} |"


def line(row: Row) -> str:
    """A row of the table, with an audit."""
    answer = leakgauge.audit(*row.asked, threat=row.threat, seed=0)
    found = answer["audited"]
    ceiling = "" if found["ceiling"] in (None, "inf") else f", of at most {found['ceiling']:.3g}"
    audited = f"at least {found['strict']:.3g}{ceiling}, by `{found['threat']}`"
    return f"{front(row)} {audited} | {answer['verdict'] if row.claims else 'NOTHING PROMISED'} | {row.why} |"


def main() -> None:
    """Write the table of the page."""
    lines = ["| mechanism | defaults | claimed | proved | audited | verdict | why |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        lines.append(line(row))
        print(lines[-1], flush=True)
    PAGE.write_text(between(PAGE.read_text("utf-8"), "\n".join(lines), BEGIN), "utf-8")


if __name__ == "__main__":
    main()
