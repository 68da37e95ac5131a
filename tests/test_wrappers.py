"""Defenses around other defenses: no member of the protocols is forgotten."""

import pytest
import torch

from leakgauge import Layout, Setting
from leakgauge.defenses._common.cascade import Cascade
from leakgauge.defenses._common.personal import Personal
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.top_k import TopK
from leakgauge.defenses.udp import UDP
from leakgauge.harness.core.defense import Defense, Evidence, Guarantee, Mechanism, Wrapper
from leakgauge.harness.federation.aggregate import Aggregated
from leakgauge.harness.study.attack import BatchedCells

SETTING = Setting(Layout(("w",), ((6,),)), 2, 2, 1, "gradient", 1, 0.1, 4, 8)
WRAPPERS = [
    Aggregated(UDP()),
    Aggregated(TopK(feedback=True)),
    Cascade(("gaussian", "sdq"), Gaussian(), SDQ()),
    BatchedCells((UDP(), TopK())),
    Personal(("udp",), ("epsilon",), (UDP(epsilon=4.0), UDP(epsilon=8.0))),
]
by_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: type(wrapper).__name__)
PROTOCOLS = pytest.mark.parametrize("protocol", [Mechanism, Evidence, Guarantee, Defense])


def again(kind, **changes):
    """A copy of a wrapper's class, made anew from its own body."""
    listed = {*kind.delegated.split(), *" ".join(kind.refused).split(), "__dict__", "__weakref__"}
    body = {name: value for name, value in vars(kind).items() if name not in listed}
    return type(kind)(kind.__name__, kind.__bases__, body | changes)


@by_wrapper
@PROTOCOLS
def test_a_member_that_a_protocol_gains_cannot_be_forgotten(wrapper, protocol, monkeypatch):
    kind = type(wrapper)
    again(kind)
    monkeypatch.setattr(protocol, "gained", lambda self: type(self).__name__, raising=False)
    with pytest.raises(TypeError, match=rf"expected {kind.__name__} to define or list each member .*not \['gained'\]"):
        again(kind)
    fields = dict(vars(wrapper))
    assert again(kind, delegated=kind.delegated + " gained")(**fields).gained() == type(wrapper.wrapped).__name__
    assert again(kind, default=kind.default + " gained")(**fields).gained() == kind.__name__
    assert again(kind, gained=lambda self: "own")(**fields).gained() == "own"
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} has no gained: no use"):
        _ = again(kind, refused={**kind.refused, "gained": "no use"})(**fields).gained


def test_a_wrapper_lists_only_members_and_each_once():
    for changes in (
        {"delegated": Aggregated.delegated + " message_distributions"},
        {"default": Aggregated.default + " claim"},
    ):
        with pytest.raises(TypeError, match=r"not \['(message_distributions|claim)'\]"):
            again(Aggregated, **changes)


@by_wrapper
def test_members_are_those_of_the_wrapped_defense_the_default_or_refused(wrapper):
    assert isinstance(wrapper, Wrapper)
    for name in wrapper.delegated.split():
        assert getattr(wrapper, name) == getattr(wrapper.wrapped, name)
    for name in wrapper.default.split():
        assert getattr(type(wrapper), name) is getattr(Defense, name)
    for name in " ".join(wrapper.refused).split():
        with pytest.raises(NotImplementedError, match=f"has no {name}: "):
            getattr(wrapper, name)


def test_a_class_derived_from_a_wrapper_changes_only_what_it_defines():
    class Louder(Cascade):
        def longest(self, state, link):
            return 1.0

    louder, plain = (kind(("gaussian", "sdq"), Gaussian(), SDQ()) for kind in (Louder, Cascade))
    assert louder.longest(None, None) == 1.0
    assert louder.local == plain.local
    assert louder.claim([None], SETTING) == plain.claim([None], SETTING)


def test_a_sum_keeps_the_memory_and_the_measures_of_its_defense():
    # these had the defaults of `Defense` while a wrapper forwarded by hand
    top, update = TopK(feedback=True), torch.ones(6)
    memory = top.remember(SETTING) + 1
    assert Aggregated(top).compensated(memory, update).tolist() == top.compensated(memory, update).tolist()
    assert Aggregated(UDP()).state_metrics(0, SETTING) == UDP().state_metrics(0, SETTING) != {}
    assert Aggregated(UDP()).promises is UDP().promises
