"""One client's CEPAM message, both ways."""

import pytest

from leakgauge import Key, Layout, Link, Sender, Setting

PRIVATE, SHARED = Key(0).child("private"), Key(0).child("shared")
WHO = Sender(0, 8)
every_n = pytest.mark.parametrize("n", [1, 2, 3])


def setting(d):
    return Setting(Layout(("w",), ((d,),)), 4, 4, 3, sends="update", steps=1, lr=0.1, batch=1, samples=100)


def encode(defense, update, shared=SHARED):
    return defense.encode(None, None, update, Link(setting(len(update)), WHO, shared), PRIVATE)[0]


def decode(defense, wire, d, shared=SHARED):
    return defense.estimate(None, wire, Link(setting(d), WHO, shared))
