import pytest

from leakgauge.harness.core.contract import MessageError
from leakgauge.harness.federation.envelope import SIZE, seal, unseal


def test_what_is_sealed_comes_out():
    sealed = seal(b"abc", 7, 3)
    assert len(sealed) == SIZE + 3 == 11
    assert unseal(sealed, 7, 3) == b"abc"
    assert unseal(seal(b"", 0, 0), 0, 0) == b""


@pytest.mark.parametrize(
    ("number", "sender", "came"), [(8, 3, "round 7 from client 3"), (7, 4, "round 7 from client 3")]
)
def test_a_message_from_another_round_or_client_is_refused(number, sender, came):
    with pytest.raises(
        MessageError, match=f"expected a message of round {number} from client {sender}, got one of {came}"
    ):
        unseal(seal(b"abc", 7, 3), number, sender)


def test_a_message_without_an_envelope_is_refused():
    with pytest.raises(MessageError, match="expected an envelope of at least 8 bytes, got 3 bytes"):
        unseal(b"abc", 0, 0)
