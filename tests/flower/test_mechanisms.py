"""Our functions send what Flower's mods and strategies send, number by number, with the same draws."""
# ruff: noqa: NPY002

import math
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.compat.client.dpfedavg_numpy_client import DPFedAvgNumPyClient
from flwr.server.strategy import DPFedAvgAdaptive, DPFedAvgFixed
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from flwr.supercore.task_identity import TaskIdentity

from leakgauge.deployed import flower_adaptive, flower_clipping, flower_local_dp, flower_secagg
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import LocalRule
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import setting_of

D, CLIENTS = 500, 20
BASE = np.linspace(-1, 1, D)
UPDATES = [np.random.RandomState(seed).normal(0, 0.02 * seed, D) for seed in range(1, 6)]


@pytest.fixture(autouse=True, scope="module")
def _task():
    """Messages of this process name a task, as those of an app do."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    yield
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = None, None, None


def sent(mod, update, seed, **config):
    """The reply that a mod makes of this update."""
    content = {"arrays": ArrayRecord({"w": Array(BASE)}), "config": ConfigRecord(config)}
    message = Message(RecordDict(content), dst_node_id=1, message_type="train")

    def train(message, context):
        metrics = MetricRecord({"num-examples": 1})
        arrays = ArrayRecord({"w": Array(BASE + update)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    np.random.seed(seed)
    return mod(message, None, train)


def ours(function, update, seed, **options):
    np.random.seed(seed)
    return function((BASE + update) - BASE, **options)


@pytest.mark.parametrize("facts", [(1.0, 1.0, 1.0, 1e-5), (1.0, 1e-4, 10.0, 1e-5), (100.0, 0.5, 2.0, 1e-6)])
def test_local_dp(facts):
    named = dict(zip(("clip", "sensitivity", "epsilon", "delta"), facts, strict=True))
    for seed, update in enumerate(UPDATES):
        theirs = sent(LocalDpMod(*facts), update, seed).content["arrays"]["w"].numpy() - BASE
        np.testing.assert_allclose(ours(flower_local_dp, update, seed, **named), theirs, rtol=1e-9, atol=1e-14)


def test_local_dp_of_flower_fails_for_an_update_of_zero():
    with pytest.raises(ZeroDivisionError):
        sent(LocalDpMod(1.0, 1.0, 1.0, 1e-5), np.zeros(D), 0)


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
@pytest.mark.parametrize("clip", [0.1, 1.0, 100.0])
def test_clipping_on_the_client(mod, clip):
    for seed, update in enumerate(UPDATES):
        reply = sent(mod, update, seed, clipping_norm=clip)
        theirs = reply.content["arrays"]["w"].numpy() - BASE
        np.testing.assert_allclose(ours(flower_clipping, update, seed, clip=clip), theirs, rtol=1e-9, atol=1e-14)
        if mod is adaptiveclipping_mod:  # the bit says that it was clipped; in the source, that it was not
            assert reply.content["metrics"]["norm_bit"] == (np.linalg.norm(update) > clip)


def test_numbers_of_a_secure_sum():
    for seed, update in enumerate(UPDATES):
        np.random.seed(seed)
        (theirs,) = dequantize(quantize([update], 8.0, 2**22), 8.0, 2**22)
        np.random.seed(seed)
        np.testing.assert_allclose(flower_secagg(update), theirs, atol=1e-12)


def aggregated(kind, seed, norm, **options):
    """The strategy after a round in which all clients send an update of this norm, and what it made of the model."""
    inner = FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, fraction_evaluate=0.0)
    strategy = getattr(strategies, f"DifferentialPrivacy{kind}Clipping")(inner, num_sampled_clients=CLIENTS, **options)
    clip, grid = strategy.clipping_norm, SimpleNamespace(get_node_ids=lambda: list(range(CLIENTS)))
    asked = list(strategy.configure_train(1, ArrayRecord({"w": Array(BASE)}), ConfigRecord(), grid))
    update = np.zeros(D)
    update[0] = min(norm, clip) if kind.startswith("Client") else norm
    metrics = {"num-examples": 1} | ({"norm_bit": int(norm > clip)} if kind == "ClientSideAdaptive" else {})
    arrays = ArrayRecord({"w": Array(BASE + update)})
    replies = [Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=one) for one in asked]
    np.random.seed(seed)
    arrays, _ = strategy.aggregate_train(1, replies)
    update[0] = min(norm, clip)
    return strategy, arrays["w"].numpy() - BASE - update


@pytest.mark.parametrize("kind", ["ServerSideFixed", "ClientSideFixed"])
def test_the_server_s_noise_with_a_fixed_clip_is_that_of_dp_fedavg(kind):
    _, noise = aggregated(kind, 3, 20.0, noise_multiplier=0.2, clipping_norm=10.0)
    np.random.seed(3)
    np.testing.assert_allclose(noise, np.random.normal(0, 0.2 * 10 / CLIENTS, D), rtol=1e-6, atol=1e-9)
    defense = registry.build("defense", "dp-fedavg", {"clip": 10.0, "noise_std": 0.2 * 10})
    spec = FederationSpec(clients=CLIENTS, rounds=1, local_steps=1)
    setting = setting_of(Layout(("w",), ((D,),)), spec, [1], LocalRule())
    assert defense.sigma(setting) / CLIENTS == pytest.approx(0.2 * 10 / CLIENTS)


@pytest.mark.parametrize("kind", ["ServerSideAdaptive", "ClientSideAdaptive"])
@pytest.mark.parametrize("norm", [0.01, 5.0])
def test_adaptive_clipping_moves_the_clip_the_wrong_way_and_adds_the_noise_of_the_moved_clip(kind, norm):
    clip, z, stated = 0.1, 1.0, flower_adaptive(1.0, CLIENTS)
    strategy, noise = aggregated(kind, 4, norm, noise_multiplier=z)
    assert (strategy.clipped_count_stddev, strategy.noise_multiplier) == (stated.count_noise, stated.sum_noise)
    np.random.seed(4)
    share = np.random.normal(CLIENTS * (norm > clip), stated.count_noise) / CLIENTS
    moved = clip * math.exp(-0.2 * (share - 0.5))
    assert strategy.clipping_norm == pytest.approx(moved)
    assert (moved < clip) == (norm > clip)  # a clip that cuts all gets smaller, one that cuts none gets larger
    expected = np.random.normal(0, stated.sum_noise * moved / CLIENTS, D)
    np.testing.assert_allclose(noise, expected, rtol=1e-6, atol=1e-9)


def older(kind, seed, norm, **options):
    """A strategy of the older API after a round of clients that wrap theirs, and what it made of the sum of updates."""
    inner = OlderFedAvg(min_fit_clients=CLIENTS, min_available_clients=CLIENTS)
    strategy = kind(inner, CLIENTS, **options)
    clip, update = strategy.clip_norm, np.zeros(D)
    update[0] = norm
    proxies = [SimpleNamespace(cid=str(k)) for k in range(CLIENTS)]
    manager = SimpleNamespace(num_available=lambda: CLIENTS, sample=lambda **_: proxies)
    asked = strategy.configure_fit(1, ndarrays_to_parameters([BASE]), manager)
    results, status = [], Status(Code.OK, "")
    np.random.seed(seed)
    for k, (proxy, ins) in enumerate(asked):
        client = SimpleNamespace(fit=lambda arrays, config, k=k: ([BASE + update], 1 + k, {}))  # of unequal sizes
        arrays, samples, metrics = DPFedAvgNumPyClient(client).fit([BASE], ins.config)
        results.append((proxy, FitRes(status, ndarrays_to_parameters(arrays), samples, metrics)))
    parameters, _ = strategy.aggregate_fit(1, results, [])
    update[0] = min(norm, clip)
    return strategy, (parameters_to_ndarrays(parameters)[0] - BASE - update) * CLIENTS


@pytest.mark.parametrize("on_server", [True, False])
def test_the_older_strategy_adds_noise_to_each_client_s_parameters_whoever_adds_it(on_server):
    clip, z = 0.1, 1.0
    _, noise = older(DPFedAvgFixed, 5, 3.0, clip_norm=clip, noise_multiplier=z, server_side_noising=on_server)
    np.random.seed(5)
    draws = np.random.normal(0, z * clip / math.sqrt(CLIENTS), (CLIENTS * (1 if on_server else 2), D))
    np.testing.assert_allclose(noise, draws.sum(0), rtol=1e-6, atol=1e-9)  # of 20 draws, the variance is (zC)^2


@pytest.mark.parametrize("norm", [0.01, 5.0])
def test_the_older_adaptive_strategy_adds_the_noise_of_the_clip_that_was_used_and_moves_it_the_right_way(norm):
    clip, stated = 0.1, flower_adaptive(1.0, CLIENTS, rate=0.0)
    strategy, noise = older(DPFedAvgAdaptive, 6, norm)
    assert (strategy.clip_count_stddev, strategy.noise_multiplier) == (stated.count_noise, stated.sum_noise)
    assert stated.effective == pytest.approx(1.0)
    np.random.seed(6)
    draws = np.random.normal(0, stated.sum_noise * clip / math.sqrt(CLIENTS), (CLIENTS, D))
    np.testing.assert_allclose(noise, draws.sum(0), rtol=1e-6, atol=1e-9)
    share = np.random.normal(CLIENTS * (norm <= clip), stated.count_noise) / CLIENTS
    assert strategy.clip_norm == pytest.approx(clip * math.exp(-0.2 * (share - 0.5)))
    assert (strategy.clip_norm < clip) == (norm <= clip)


def test_flower_s_accountant_returns_more_than_the_exact_epsilon_of_equal_weights():
    without = SamplingMethod.NO_AMPLIFICATION, NeighboringRelation.ADD_OR_REMOVE_ONE
    config = PrivacyConfig(1e-5, 100, without[1], without[0])
    accountant = RdpAccountant(config)
    accountant.compose(GaussianPrivacyEvent(0.2, CLIENTS, 100), 3)
    defense = registry.build("defense", "dp-fedavg", {"clip": 10.0, "noise_std": 2.0})
    spec = FederationSpec(clients=CLIENTS, rounds=3, local_steps=1)
    claim = defense.claim([None] * 3, setting_of(Layout(("w",), ((D,),)), spec, [1], LocalRule()))
    exact = claim.proved.epsilon(1e-5)
    assert exact < accountant.get_epsilon(1e-5) < 1.2 * exact
