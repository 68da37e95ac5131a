"""leakgauge measures how much a federated-learning defense really leaks.

Public names are imported at their first use, so the command starts without torch.
"""

TYPE_CHECKING = False  # imports nothing, because `python -m leakgauge` starts with the working folder in its path
if TYPE_CHECKING:
    from typing import Any

    from leakgauge.harness.audit.claims import claim as claim
    from leakgauge.harness.audit.standalone import audit as audit
    from leakgauge.harness.cli.inspect import inspect as inspect
    from leakgauge.harness.cli.python import report as report
    from leakgauge.harness.cli.python import run as run
    from leakgauge.harness.core import rng as rng
    from leakgauge.harness.core.checks import check_update as check_update
    from leakgauge.harness.core.checks import positive as positive
    from leakgauge.harness.core.claim import Arithmetic as Arithmetic
    from leakgauge.harness.core.claim import Claim as Claim
    from leakgauge.harness.core.claim import Proof as Proof
    from leakgauge.harness.core.claim import Relation as Relation
    from leakgauge.harness.core.claim import Unit as Unit
    from leakgauge.harness.core.claim import claim_over as claim_over
    from leakgauge.harness.core.claim import nothing_promised as nothing_promised
    from leakgauge.harness.core.code import states as states
    from leakgauge.harness.core.codec import check_length as check_length
    from leakgauge.harness.core.codec import pack_float32 as pack_float32
    from leakgauge.harness.core.codec import pack_levels as pack_levels
    from leakgauge.harness.core.codec import unpack_float32 as unpack_float32
    from leakgauge.harness.core.codec import unpack_levels as unpack_levels
    from leakgauge.harness.core.contract import Attack as Attack
    from leakgauge.harness.core.contract import Defense as Defense
    from leakgauge.harness.core.contract import Guess as Guess
    from leakgauge.harness.core.contract import Labels as Labels
    from leakgauge.harness.core.contract import Likelihood as Likelihood
    from leakgauge.harness.core.contract import Link as Link
    from leakgauge.harness.core.contract import Links as Links
    from leakgauge.harness.core.contract import Membership as Membership
    from leakgauge.harness.core.contract import Observation as Observation
    from leakgauge.harness.core.contract import Reconstruction as Reconstruction
    from leakgauge.harness.core.contract import Sender as Sender
    from leakgauge.harness.core.contract import Setting as Setting
    from leakgauge.harness.core.contract import Task as Task
    from leakgauge.harness.core.distribution import Additive as Additive
    from leakgauge.harness.core.distribution import MessageDistribution as MessageDistribution
    from leakgauge.harness.core.distribution import Normal as Normal
    from leakgauge.harness.core.distribution import PairLoss as PairLoss
    from leakgauge.harness.core.distribution import Reading as Reading
    from leakgauge.harness.core.distribution import projected as projected
    from leakgauge.harness.core.errors import MessageError as MessageError
    from leakgauge.harness.core.gaussian import gaussian_mu as gaussian_mu
    from leakgauge.harness.core.result import Run as Run
    from leakgauge.harness.core.rng import Key as Key
    from leakgauge.harness.core.vec import Layout as Layout
    from leakgauge.harness.data import load as _load
    from leakgauge.harness.data.given import given as _data
    from leakgauge.harness.data.sequences import series as series
    from leakgauge.harness.data.sequences import tokens as tokens
    from leakgauge.harness.federation.registry import lookup as lookup
    from leakgauge.harness.federation.round import Round as Round
    from leakgauge.harness.learn.modules import given as _model
    from leakgauge.harness.study.store import load_run as load_run
    from leakgauge.harness.study.study import Study as Study
    from leakgauge.harness.study.study import load_study as load_study

    given_data, given_model, load_data = _data, _model, _load

__version__ = "0.2.0"

_NAMES = {
    "audit.claims": "claim",
    "audit.standalone": "audit",
    "cli.inspect": "inspect",
    "cli.python": "report run",
    "core.gaussian": "gaussian_mu",
    "core.checks": "check_update positive",
    "core.claim": "Arithmetic Claim Proof Relation Unit claim_over nothing_promised",
    "core.code": "states",
    "core.codec": "check_length pack_float32 pack_levels unpack_float32 unpack_levels",
    "core.contract": "Attack Defense Guess Labels Likelihood Link Links Membership Observation Reconstruction Sender"
    " Setting Task",
    "core.errors": "MessageError",
    "core.distribution": "Additive MessageDistribution Normal PairLoss Reading projected",
    "core.result": "Run",
    "core.rng": "Key rng",
    "core.vec": "Layout",
    "data.sequences": "series tokens",
    "federation.registry": "lookup",
    "federation.round": "Round",
    "study.store": "load_run",
    "study.study": "Study load_study",
}
_WHERE = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}
_WHERE |= {
    "given_data": ("data.given", "given"),
    "given_model": ("learn.modules", "given"),
    "load_data": ("data", "load"),
}

__all__ = sorted([*_WHERE, "__version__"])


def __getattr__(name: str) -> "Any":
    """Import a public name at its first use."""
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'leakgauge' has no attribute {name!r}; it has: {', '.join(__all__)}")
    where, attribute = _WHERE[name]
    module = importlib.import_module(f"leakgauge.harness.{where}")
    return module if name == "rng" else getattr(module, attribute)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
