"""Minibatches, losses, and the update: what moves, what stops it, what it reports."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from conftest import with_both_scripts
from helpers import (
    is_recurrent,
    make_agent,
    make_run,
    minibatches_ahead,
    old_of_critics,
    policy_params,
    prepare_rollout,
    roll,
    small_args,
    value_outputs,
)
from helpers import prepare as prepare_raw
from torch.testing import assert_close


def prepare(run):
    """A batch with advantages as the policy's loss takes them. `update` leaves them alone then."""
    batch = prepare_raw(run)
    scaled = run.script.normalize_advantages(batch.advantages).float()
    run.args.norm_adv = False
    run.batch = batch._replace(advantages=scaled)
    return run.batch


def run_update(run, ent_coef=0.0, algorithm=torch.optim.Adam, batch=None, **flags):
    """One update of a copy of the run's agent, with some flags changed: metrics and the agent."""
    agent = copy.deepcopy(run.agent)
    args = copy.copy(run.args)
    for key, value in flags.items():
        setattr(args, key, value)
    agent.value_dist.args = args
    vectors = [x.param_groups[0]["params"] for x in run.script.make_optimizers(agent, args)]
    optimizers = run.script.Optimizers(*(algorithm(x, args.learning_rate) for x in vectors))
    torch.manual_seed(5)
    args.ent_coef = ent_coef
    metrics = run.script.update(agent, optimizers, batch or run.batch, args, progress=0.0)
    return metrics, agent


def test_each_adam_starts_with_its_own_rate(script):
    """Also for loops that do not call `update`. Without a rate of their own critics have the
    actor's."""
    run = make_run(script, "VectorBox")
    run.args.learning_rate = 1e-4
    for rate, expected in ((None, 1e-4), (1e-3, 1e-3)):
        run.args.critic_learning_rate = rate
        actor, critics = run.script.make_optimizers(run.agent, run.args)
        assert (actor.param_groups[0]["lr"], critics.param_groups[0]["lr"]) == (1e-4, expected)


def test_observations_may_come_without_an_axis_of_steps(script):
    """(6, D) are those of (2, 3, D)."""
    run = make_run(script, "VectorBox")
    obs = torch.randn(2, 3, *run.agent.obs_shape)
    one, two = copy.deepcopy(run.agent), copy.deepcopy(run.agent)
    one.update_obs_moments(obs)
    two.update_obs_moments(obs.flatten(0, 1))
    assert_close(one.obs_moments.var, two.obs_moments.var)
    assert one.obs_moments.var.shape == run.agent.obs_shape


@pytest.mark.parametrize("env", ["VectorBox", "VectorDiscrete"])
def test_critics_train_alone_where_the_actor_s_rate_is_0(script, env):
    """No parameter of the actor moves, and all of the critics do."""
    run = make_run(script, env)
    prepare(run)
    flags = {"learning_rate": 0.0, "critic_learning_rate": 1e-3, "target_kl": 0.01}
    _, agent = run_update(run, ent_coef=0.1, **flags)
    (before, critics), (after, moved) = run.agent.parts(), agent.parts()
    assert all(map(torch.equal, before, after))
    assert not any(map(torch.equal, critics, moved))


def test_a_policy_that_does_not_change_is_evaluated_for_one_epoch(run, monkeypatch):
    """The critics are trained for all of them, as with a tiny rate of the actor, which moves it by
    rounding alone."""
    policy_loss = run.script.policy_loss
    critics = [[x.clone() for x in run.agent.parts()[1]]]
    calls = []
    monkeypatch.setattr(
        run.script, "policy_loss", lambda *given: calls.append(1) or policy_loss(*given)
    )
    for rate in (0.0, 1e-30):
        rates = {"learning_rate": rate, "critic_learning_rate": 1e-3}
        metrics, agent = run_update(run, update_epochs=3, **rates)
        critics.append([x.clone() for x in agent.parts()[1]])
        epochs = 1 if rate == 0 else 3
        assert len(calls) == epochs * run.args.num_minibatches
        assert metrics["policy/epochs_done"] == epochs
        calls.clear()
    before, alone, beside = critics
    assert all(map(torch.equal, alone, beside))
    assert not any(map(torch.equal, before, alone))


def test_encoders_may_have_frozen_layers_or_no_parameters(script, tmp_path, monkeypatch):
    """A frozen layer keeps its weights, and the others train. An encoder of fixed features has
    neither parameters nor a device of its own."""
    frozen = []

    def with_frozen_layer(space, args):
        fixed = torch.nn.Linear(*space.shape, args.hidden_size).requires_grad_(False)
        frozen.append((fixed, fixed.weight.clone()))
        return torch.nn.Sequential(fixed, torch.nn.Linear(args.hidden_size, args.hidden_size))

    args = small_args(script, "Walk", run_dir=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(script, "make_encoder", with_frozen_layer)
        script.train(args)
        assert all(torch.equal(layer.weight, before) for layer, before in frozen)
    monkeypatch.setattr(script, "make_encoder", lambda space, args: torch.nn.Identity())
    assert script.train(replace(args, hidden_size=1))["run_dir"]


def test_parameters_that_nobody_would_train_are_refused(script):
    """A module that `parts` does not know, unless it is frozen."""
    run = make_run(script, "VectorBox")
    run.agent.frozen = torch.nn.Linear(2, 3).requires_grad_(False)
    script.make_optimizers(run.agent, run.args)
    run.agent.further = torch.nn.Linear(2, 3)
    told = r"Agent\.parts: further\.weight, further\.bias would never be trained"
    with pytest.raises(ValueError, match=told):
        script.make_optimizers(run.agent, run.args)


@with_both_scripts
@pytest.mark.parametrize("long", [False, True])
def test_what_waits_for_the_first_loop_is_set_free(script, two_cores, monkeypatch, long):
    """Also where an exception comes before that loop has begun: it would wait for ever. The second
    loop does not begin in this thread then."""
    agent = make_agent(script, small_args(script, "VectorBox"))
    monkeypatch.setattr(script.Agent, "second_thread_pays", long)
    queue, ended = SimpleQueue(), []

    def fault():
        raise KeyboardInterrupt

    def wait():
        ended.append(queue.get(timeout=60))
        return "second"

    release = partial(queue.put, "released")
    with pytest.raises(KeyboardInterrupt):
        script.run_both(fault, wait, agent, between=release)
    assert ended == ["released"] * long
    while not queue.empty():
        queue.get()
    assert script.run_both(lambda: "first", wait, agent, between=release) == ("first", "second")


def test_observations_that_are_not_normalised_are_not_counted(script):
    """Their statistics stay as they were made."""
    run = make_run(script, "VectorBox", norm_obs=False)
    before = copy.deepcopy(run.agent.obs_moments.state_dict())
    run.agent.update_obs_moments(torch.randn(5, 2, *run.agent.obs_shape))
    after = run.agent.obs_moments.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


# ---- a reference in float64, with its graph
def policy_terms(params, actions):
    """Log-probabilities and entropy of logits (..., P, K) or of Gaussians (..., 2, A)."""
    params = params.double()
    if actions.is_floating_point():
        mean, log_std = params.unbind(-2)
        z = (actions.double() - mean) / log_std.exp()
        log_prob = -(z.square() / 2 + log_std + np.log(2 * np.pi) / 2).sum(-1)
        return log_prob, (log_std + np.log(2 * np.pi * np.e) / 2).sum(-1)
    logp = params.log_softmax(-1)
    log_prob = logp.gather(-1, actions[..., None])[..., 0].sum(-1)
    return log_prob, -(logp.exp() * logp).sum((-2, -1))


def divergence(old, new, continuous):
    """KL(old || new) in closed form."""
    old, new = old.double(), new.double()
    if not continuous:
        old, new = old.log_softmax(-1), new.log_softmax(-1)
        return (old.exp() * (old - new)).sum((-2, -1))
    (mean, log_std), (new_mean, new_log_std) = old.unbind(-2), new.unbind(-2)
    squares = (2 * log_std).exp() + (mean - new_mean).square()
    return (new_log_std - log_std + squares / (2 * (2 * new_log_std).exp()) - 0.5).sum(-1)


def quantile_terms(outputs, targets, old, args):
    """Losses and share changed by mean_only clipping. Dabney et al. 2018a, eq. 8 to 10."""
    K = outputs.shape[-1]
    taus = (torch.arange(K).double() + 0.5) / K

    def loss(q):
        u = targets[..., None, :] - q[..., None]
        huber = torch.where(
            u.abs() <= args.kappa, u**2 / 2, args.kappa * (u.abs() - args.kappa / 2)
        )
        return ((taus[:, None] - (u < 0).double()).abs() * huber / args.kappa).mean((-2, -1))

    mean, old_mean = outputs.mean(-1, True), old.mean(-1, True)
    d = args.vf_clip_coef
    clipped = outputs + (old_mean + (mean - old_mean).clamp(-d, d) - mean)
    return loss(outputs), loss(clipped), ((mean - old_mean).abs() > d)[..., 0]


def categorical_terms(logits, targets, old, args):
    """The same for atoms: cross-entropy, Bellemare et al. 2017, algorithm 1. What a clipped mean is
    off, the targets move the other way."""
    atoms = torch.linspace(args.v_min, args.v_max, args.num_atoms, dtype=torch.float64)
    mean, old_mean, d = logits.softmax(-1) @ atoms, old[..., 0], args.vf_clip_coef
    shift = old_mean + (mean - old_mean).clamp(-d, d) - mean
    moved = (atoms - shift[..., None]).clamp(args.v_min, args.v_max)
    step = (args.v_max - args.v_min) / (args.num_atoms - 1)
    share = (1 - (moved[..., :, None] - atoms).abs() / step).clamp(min=0)  # (C, ..., K, K')
    moved_targets = (targets[..., None] * share).sum(-2)
    plain, clipped = (-(x * logits.log_softmax(-1)).sum(-1) for x in (targets, moved_targets))
    return plain, clipped, shift.abs() > 1e-6


def value_losses(agent, mb, args):
    """Losses (C, ...) of distribution and V, and whether clipping changes either."""
    outputs, old = value_outputs(agent, mb).double(), old_of_critics(mb).double()
    quantiles = hasattr(args, "num_quantiles")
    K = args.num_quantiles if quantiles else args.num_atoms
    terms = quantile_terms if quantiles else categorical_terms
    old_part = old[..., :K] if quantiles else old[..., :1]
    parts = [terms(outputs[..., :K], mb.targets.double(), old_part, args)]
    if args.value_from == "mean_head":  # PPO's value loss, Schulman et al. 2017, eq. 9
        value, old_value, d = outputs[..., K], old[..., -1], args.vf_clip_coef
        if (
            not quantiles and args.mean_output == "correction"
        ):  # the mean of atoms, which this loss does not train, and what is beyond
            atoms = torch.linspace(args.v_min, args.v_max, K, dtype=torch.float64)
            value = 0.1 * value + outputs[..., :K].detach().softmax(-1) @ atoms
        near = old_value + (value - old_value).clamp(-d, d)
        errors = [(x - mb.returns.double()).square() / 2 for x in (value, near)]
        parts.append((*errors, (value - old_value).abs() > d))
    else:
        assert outputs.shape[-1] == K
    if args.vf_clip == "none":
        return sum(plain for plain, *_ in parts), torch.zeros(()).bool()
    loss = sum(torch.maximum(plain, clipped) for plain, clipped, _ in parts)
    return loss, torch.stack([changed for *_, changed in parts]).any(0)


def reference(script, agent, mb, args, ent_coef):
    """Both losses and mean metrics of a minibatch. Schulman et al. 2017, eq. 7 and 9."""
    params = policy_params(agent, mb)
    log_prob, entropy = policy_terms(params, mb.actions)
    log_ratio, A = log_prob - mb.log_probs.double(), mb.advantages.double()
    r, eps = log_ratio.exp(), args.clip_coef
    policy_loss = -torch.minimum(r * A, r.clamp(1 - eps, 1 + eps) * A).mean()
    floor = torch.relu(args.min_entropy - entropy.mean())

    per_sample, changed = value_losses(agent, mb, args)
    of_critics = per_sample.flatten(1).mean(1)
    loss = policy_loss - ent_coef * entropy.mean() + args.min_entropy_penalty * floor
    return {
        "loss": loss,
        "losses/policy_loss": policy_loss,
        "losses/value_loss": of_critics.mean(),
        "losses/entropy": entropy.mean(),
        "losses/approx_kl": (r - 1 - log_ratio).mean(),
        "losses/clipfrac": ((r - 1).abs() > eps).double().mean(),
        "twin/loss_1": of_critics[0],
        "twin/loss_2": of_critics[-1],
        "value/clip_fraction": changed.double().mean(),
        "policy/kl_exact": divergence(mb.params, params, mb.actions.is_floating_point()).mean(),
        "policy/log_ratio": log_ratio.mean(),
        "policy/ratio_mean": r.mean(),
        "policy/ratio_std": r.std(correction=0),
    }


@pytest.fixture
def run(script, request):
    """A prepared rollout with old values that differ from what the heads predict."""
    flags = {"value_from": getattr(request, "param", "mean_head")}
    if flags["value_from"] == "mean_output":
        if is_recurrent(script):
            pytest.skip("a flag of atoms")
        flags = {"value_from": "mean_head", "mean_output": "value"}
    run = make_run(script, "VectorMultiDiscrete", learning_rate=1e-2, **flags)
    prepare(run)
    prepare(run)
    old = run.batch.old_predictions
    run.batch = run.batch._replace(old_predictions=old + 0.3 * torch.randn_like(old))
    return run


# V may come from the distribution as well. Tests of the actor, of Adam and of threads do not
# depend on that.
with_either_value = pytest.mark.parametrize(
    "run", ["distribution", "mean_head", "mean_output"], indirect=True
)


# ---- minibatches
def test_minibatches_are_a_shuffled_partition(script):
    """Every sequence or row once per epoch, all of its parts together, in a new order each time."""
    short = {"seq_len": 4} if is_recurrent(script) else {}
    run = make_run(script, "Counter", num_envs=6, num_minibatches=3, **short)
    batch, axis = prepare(run), int(is_recurrent(script))
    number = batch.advantages.shape[axis]  # of sequences or rows
    marks = torch.arange(number).expand(batch.advantages.shape if axis else number).float()
    marked = batch._replace(advantages=marks)
    parts = list(script.minibatches(marked, run.args))
    assert len(parts) == 6
    orders = []
    for epoch in (parts[:3], parts[3:]):
        seen = []
        for mb in epoch:
            assert mb.advantages.shape[axis] == number // 3
            rows = mb.advantages.select(0, 0) if axis else mb.advantages
            seen += rows.long().tolist()
            for name in batch._fields:
                expected = getattr(marked, name).index_select(axis, rows.long())
                assert torch.equal(getattr(mb, name), expected), name
        assert sorted(seen) == list(range(number))
        assert seen != list(range(number))
        orders.append(seen)
    assert orders[0] != orders[1]


def test_with_an_early_stop_all_environments_still_get_used(script):
    """One minibatch per update, several updates: the shuffled order reaches every environment."""
    run = make_run(script, "Counter", num_envs=4, num_minibatches=4, target_kl=1e-9)
    used = set()
    for _ in range(25):
        prepare(run)
        names = run.agent.normalize_obs(run.rollout.obs)[0, :, 0]
        first = minibatches_ahead(script, run.batch, run.args)[0]
        script.update(run.agent, run.optimizers, run.batch, run.args, 0.0)
        used.add(int((names - first.obs.flatten(0, -2)[0, 0]).abs().argmin()))
        if len(used) == 4:
            break
    assert used == {0, 1, 2, 3}


# ---- losses
def moved(run, std=0.1):
    """A minibatch and a copy of the agent whose policy and values are no longer those of it."""
    agent = copy.deepcopy(run.agent)
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(std * torch.randn_like(p))
    return minibatches_ahead(run.script, run.batch, run.args)[0], agent


@pytest.mark.parametrize("vf_clip", ["none", "mean_only"])
@pytest.mark.parametrize("env", ["VectorMultiDiscrete", "VectorBox"])
def test_losses_and_metrics_against_float64(script, value_from, env, vf_clip):
    """Every number of a minibatch on which ratios are clipped and values have moved; distributions
    are trained on samples, V on the lambda-return."""
    flags = {"vf_clip": vf_clip, "vf_clip_coef": 0.02, "clip_coef": 0.1, "value_from": value_from}
    flags |= {"min_entropy": 9.0, "min_entropy_penalty": 0.3, "value_target": "sr_lambda"}
    run = make_run(script, env, **flags)
    prepare(run)
    prepare(run)
    mb, agent = moved(run, 0.15)
    loss, kl, metrics = script.policy_loss(agent, mb, run.args, 0.02)
    of_critics, critic_metrics = script.value_loss(agent, mb, run.args)
    expected = reference(script, agent, mb, run.args, 0.02)
    assert 0.01 < expected["losses/clipfrac"] < 0.99
    assert (expected["value/clip_fraction"] > 0.05) == (vf_clip != "none")
    found = {"loss": loss} | metrics | critic_metrics
    assert float(of_critics.detach()) == float(critic_metrics["losses/value_loss"])
    assert float(kl) == float(metrics["policy/kl_exact"])
    assert not kl.requires_grad
    assert found.keys() == expected.keys() - {"policy/ratio_mean", "policy/ratio_std"}
    for key, x in found.items():
        value = float(expected[key].detach())
        assert float(x.mean().detach()) == pytest.approx(value, rel=1e-4), key


@with_either_value
@pytest.mark.parametrize("floor", [-9.0, 9.0])
def test_the_loss_is_the_sum_of_its_parts(run, floor):
    """policy_loss - c H + p relu(floor - H), and the mean of the critics, of the metrics."""
    args = copy.copy(run.args)
    args.min_entropy, args.min_entropy_penalty = floor, 0.3
    mb, agent = moved(run)
    loss, _, metrics = run.script.policy_loss(agent, mb, args, 0.02)
    m = {key: float(x.mean()) for key, x in metrics.items()}
    entropy = m["losses/entropy"]
    expected = m["losses/policy_loss"] - 0.02 * entropy + 0.3 * max(floor - entropy, 0)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss, metrics = run.script.value_loss(agent, mb, args)
    m = {key: float(x.mean()) for key, x in metrics.items()}
    assert float(loss.detach()) == pytest.approx(m["losses/value_loss"], rel=1e-5)
    assert m["losses/value_loss"] == pytest.approx((m["twin/loss_1"] + m["twin/loss_2"]) / 2)
    assert m["twin/loss_1"] != pytest.approx(m["twin/loss_2"], rel=1e-5)


@pytest.fixture
def compiling(script):
    """Nothing compiled before or after, though it lasts as long as the process."""
    if not hasattr(script, "compiled"):
        pytest.skip("the recurrent script has nothing to compile")
    script.compiled.cache_clear()
    torch._dynamo.reset()
    yield
    script.compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("env", ["VectorMultiDiscrete", "VectorBox"])
def test_compiled_losses_are_those_of_eager_mode(script, compiling, env, value_from):
    """Loss, metrics and gradients to 1e-5. The entropy coefficient may change from call to call:
    each of the two losses is compiled once."""
    run = make_run(script, env, value_from=value_from, vf_clip="mean_only", ent_coef=0.02)
    prepare(run)
    mb, agent = moved(run)
    torch._dynamo.utils.counters.clear()
    for loss_of, part, more in (
        (script.policy_loss, 0, (torch.tensor(0.0),)),
        (script.policy_loss, 0, (torch.tensor(0.01),)),
        (script.policy_loss, 0, (torch.tensor(0.007),)),
        (script.value_loss, 1, ()),
    ):
        inputs = (loss_of, agent.parts()[part], agent, mb, run.args, *more)
        eager = script.with_gradient(*inputs)
        found = script.compiled(script.with_gradient)(*inputs)
        assert_close(found[:-1], eager[:-1], rtol=1e-5, atol=1e-5)
        assert_close(found[-1], eager[-1], rtol=1e-5, atol=1e-5)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.slow
def test_what_is_compiled_does_not_depend_on_earlier_runs(script, compiling):
    """torch would make a general version of a second size, and go back to eager mode at a ninth
    one. Here each of ten sizes has its own version, and the first one is still there at the end."""
    torch._dynamo.utils.counters.clear()
    double = script.compiled(lambda x: 2 * x)
    for size in (*range(2, 12), 2):
        assert torch.equal(double(torch.ones(size)), 2 * torch.ones(size))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 10


@pytest.mark.parametrize("asked", [False, True])
def test_the_update_takes_compiled_gradients_where_asked(script, monkeypatch, compiling, asked):
    """Ours: what torch.compile makes of them, made once; without the flag nothing is made. Both
    losses go through it."""
    made, losses = [], []

    def compile_nothing(function, dynamic):
        made.append(function)

        def note(loss, *inputs):
            losses.append(loss)
            return function(loss, *inputs)

        return note

    monkeypatch.setattr(torch, "compile", compile_nothing)
    run = make_run(script, "Counter", compile=asked)
    for _ in range(2):
        script.update(run.agent, run.optimizers, prepare(run), run.args, 0.5)
    assert made == [script.with_gradient] * asked
    assert {*losses} == ({script.policy_loss, script.value_loss} if asked else set())


@pytest.mark.parametrize("env", ["VectorBox", "VectorDiscrete"])
def test_each_optimizer_has_the_vector_of_its_network(script, env):
    """Ours: what moves a vector moves the parameters of one network, which keep their values."""
    run = make_run(script, env)
    agent = copy.deepcopy(run.agent)
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    optimizers = script.make_optimizers(agent, run.args)
    vectors = [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]
    assert sum(len(vector) for vector in vectors) == sum(x.numel() for x in before.values())
    assert all(torch.equal(p, before[name]) for name, p in agent.named_parameters())
    with torch.no_grad():
        for vector, change in zip(vectors, (1, -1), strict=True):
            vector += change
    for name, p in agent.named_parameters():
        change = 1 if name.startswith("act") else -1
        assert torch.equal(p, before[name] + change), name


def test_both_optimizers_have_the_constants_of_adam(run):
    """torch's own, but for the epsilon of PPO scripts."""
    expected = {"betas": (0.9, 0.999), "weight_decay": 0, "maximize": False, "eps": 1e-5}
    for optimizer in run.optimizers:
        [group] = optimizer.param_groups
        assert {name: group[name] for name in expected} == expected
        assert group["lr"] == run.args.learning_rate


def test_a_bonus_that_rises_from_0_is_applied(script):
    """0.05 of the entropy, on the way from 0 to 0.1."""
    run = make_run(script, "VectorDiscrete", ent_coef=0.0, ent_coef_final=0.1)
    prepare(run)
    mb, agent = moved(run)
    loss, _, metrics = script.policy_loss(agent, mb, run.args, 0.05)
    bonus = 0.05 * metrics["losses/entropy"].mean()
    assert_close(loss, metrics["losses/policy_loss"] - bonus)
    assert bonus > 0.01


def test_a_step_of_adam_is_that_of_torch(run):
    """The same vector after three steps of torch's own optimizer, whatever its group says, and the
    same content of a checkpoint. No hook of a profiler is run."""
    ours, _ = run.script.make_optimizers(run.agent, run.args)
    [vector] = ours.param_groups[0]["params"]
    other = torch.nn.Parameter(vector.detach().clone())
    theirs = torch.optim.Adam([other], ours.param_groups[0]["lr"], eps=1e-5, fused=True)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0] |= {"weight_decay": 0.1, "maximize": True, "betas": (0.8, 0.9)}
    for factor in (1, -30, 0.2):
        other.grad = factor * torch.linspace(-1, 2, len(vector))
        vector.grad = other.grad.clone()
        ours.step()
        theirs.step()
        assert_close(vector, other, rtol=1e-6, atol=1e-7)
    found, expected = ours.state_dict(), theirs.state_dict()
    assert_close(found["state"], expected["state"], rtol=1e-6, atol=1e-7)
    assert found["param_groups"] == expected["param_groups"]  # `fused` tells where `step` lies
    with torch.profiler.profile() as seen:
        ours.step()
    assert not any("Optimizer.step" in event.name for event in seen.events())


@pytest.mark.parametrize("network", ["actor", "critics"])
def test_each_loop_gets_what_its_loss_reads(run, network):
    """The loss is that of the whole minibatch, and fails without any field that is given."""
    mb, agent = moved(run)
    agent.value_dist.args.vf_clip = "mean_only"  # it reads the old values
    loss_of = run.script.policy_loss if network == "actor" else run.script.value_loss
    more = (0.01,) if network == "actor" else ()
    given = getattr(mb, f"for_{network}")()
    loss, *_ = loss_of(agent, given, run.args, *more)
    whole, *_ = loss_of(agent, mb, run.args, *more)
    assert torch.equal(loss, whole)
    for name in [name for name, x in given._asdict().items() if x is not None]:
        with pytest.raises((TypeError, AttributeError)):
            loss_of(agent, given._replace(**{name: None}), run.args, *more)


@with_either_value
@pytest.mark.parametrize("name", ["policy_loss", "value_loss"])
def test_losses_are_pure(run, name):
    """The same result twice; parameters, buffers, gradients, minibatch and RNG as they were."""
    mb, agent = moved(run)
    more = (0.01,) if name == "policy_loss" else ()
    function = getattr(run.script, name)
    kept = {key: x.clone() for key, x in agent.state_dict().items()}
    copies, flags, rng = [x.clone() for x in mb], vars(run.args).copy(), torch.get_rng_state()
    (one, *_, first), (two, *_, second) = (function(agent, mb, run.args, *more) for _ in range(2))
    assert torch.equal(one, two)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(x, kept[key]) for key, x in agent.state_dict().items())
    assert all(p.grad is None for p in agent.parameters())
    assert all(torch.equal(x, y) for x, y in zip(mb, copies))
    assert vars(run.args) == flags
    assert torch.equal(torch.get_rng_state(), rng)
    assert one.requires_grad
    assert one.dim() == 0


@with_either_value
def test_the_order_of_a_minibatch_does_not_matter(run):
    """Rows or sequences permuted together leave the loss; advantages turned round alone do not."""
    mb, agent = moved(run)
    advantages = torch.linspace(-5, 5, mb.advantages.numel()).view_as(mb.advantages)
    mb, axis = mb._replace(advantages=advantages), int(is_recurrent(run.script))
    turned = type(mb)(*(x.flip(axis) for x in mb))
    alone = mb._replace(advantages=-advantages)  # the same numbers, in the other order
    one, same, other = (
        run.script.policy_loss(agent, x, run.args, 0.01)[0] for x in (mb, turned, alone)
    )
    assert_close(same, one, rtol=1e-5, atol=1e-6)
    assert abs(float((other - one).detach())) > 1e-4
    one, same = (run.script.value_loss(agent, x, run.args)[0] for x in (mb, turned))
    assert_close(same, one, rtol=1e-5, atol=1e-6)


@with_either_value
def test_each_critic_is_clipped_around_its_own_old_values(run):
    """Other old values of critic 2: its loss changes, that of critic 1 does not by a bit."""
    run.args.vf_clip = "mean_only"
    mb, agent = moved(run)
    old = mb.old_predictions.clone()
    old[..., 1, :] += 2
    _, one = run.script.value_loss(agent, mb, run.args)
    _, two = run.script.value_loss(agent, mb._replace(old_predictions=old), run.args)
    assert torch.equal(one["twin/loss_1"], two["twin/loss_1"])
    assert not torch.equal(one["twin/loss_2"], two["twin/loss_2"])


# ---- the update
@pytest.mark.parametrize("env", ["VectorMultiDiscrete", "VectorBox", "ImageMultiDiscrete"])
def test_every_parameter_learns(script, env):
    """Encoder, LSTM and heads of the actor and of both critics move."""
    run = make_run(script, env, num_minibatches=1, update_epochs=1)
    prepare(run)
    before = {k: p.detach().clone() for k, p in run.agent.named_parameters()}
    script.update(run.agent, run.optimizers, run.batch, run.args, 0.01)
    for key, p in run.agent.named_parameters():
        assert (p - before[key]).abs().max() > 0, key


def test_twin_heads_start_apart(script):
    """Equal twins would stay equal: they see the same targets."""
    run = make_run(script, "VectorDiscrete")
    agent = make_agent(script, run.args)
    one, two = (dict(head.named_parameters()) for head in agent.critic_heads)
    weights = [key for key in one if "weight" in key]
    assert len(weights) == 2
    assert all((one[key] - two[key]).abs().max() > 1e-3 for key in weights)


@with_either_value
@pytest.mark.parametrize("vf_clip", ["none", "mean_only"])
def test_metrics_are_means_over_the_minibatches(run, vf_clip):
    """Reported numbers recomputed in float64 from each minibatch, the weights standing still."""
    targets = run.batch.targets.clone()
    targets.select(int(is_recurrent(run.script)), 0).add_(3)
    run.batch = run.batch._replace(targets=targets)  # large losses: no minibatch has the mean
    torch.manual_seed(5)  # as `run_update` does
    parts = minibatches_ahead(run.script, run.batch, run.args)
    metrics, agent = run_update(run, learning_rate=1e-30, ent_coef=0.01, vf_clip=vf_clip)
    run.args.vf_clip = vf_clip
    rows = [reference(run.script, agent, mb, run.args, 0.01) for mb in parts]
    assert len(rows) == 4
    for tag in rows[0].keys() - {"loss", "policy/log_ratio"}:
        mean = sum(float(row[tag].detach()) for row in rows) / 4
        assert metrics[tag] == pytest.approx(mean, rel=1e-4, abs=1e-5), tag
    last = float(rows[-1]["losses/value_loss"].detach())
    assert metrics["losses/value_loss"] != pytest.approx(last, rel=1e-3)
    assert (metrics["value/clip_fraction"] > 0.01) == (vf_clip != "none")
    assert metrics["policy/ratio_first_minibatch_error"] < 1e-5
    assert metrics["policy/epochs_done"] == 2
    assert metrics["policy/stopped_early"] == 0
    assert metrics["policy/kl_max"] < 1e-6


@pytest.fixture
def warn_always():
    """Every warning of torch is given; without this each is given once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@with_either_value
def test_metrics_move_with_the_policy(run, warn_always):
    """While the policy moves, ratios spread, KL grows, and its maximum exceeds its mean.
    No warning: torch gives one where a metric still holds the graph of its minibatch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics, _ = run_update(run, learning_rate=0.05, update_epochs=3)
    assert metrics["policy/ratio_std"] > 0.01
    assert metrics["losses/clipfrac"] > 0
    assert metrics["policy/kl_max"] > metrics["policy/kl_exact"] > 0
    assert metrics["policy/ratio_first_minibatch_error"] < 1e-5
    assert metrics["losses/approx_kl"] > 0
    ratio = metrics["policy/kl_exact"] / metrics["losses/approx_kl"]  # a mean and its estimate
    assert 1 / 3 < ratio < 3


def steps_by_hand(run, limit=float("inf"), ent_coef=0.01):
    """Gradient descent on the reference's losses as the update documents it: the actor's loop, then
    the critics' over as many minibatches of its own permutations. The agent and the KLs seen."""
    agent, args, seen = copy.deepcopy(run.agent), run.args, []

    def descend(loss, parameters):
        agent.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        with torch.no_grad():
            for p in parameters:
                p.sub_(args.learning_rate * p.grad)
            if hasattr(agent.action_dist, "log_std"):
                agent.action_dist.log_std.clamp_(-5, 2)

    torch.manual_seed(5)  # as `run_update` does
    for mb in run.script.minibatches(run.batch, args):
        row = reference(run.script, agent, mb, args, ent_coef)
        seen.append(float(row["policy/kl_exact"].detach()))
        if seen[-1] > limit:
            break
        descend(row["loss"], actor_of(agent))
    for _, mb in zip(seen, run.script.minibatches(run.batch, args)):
        row = reference(run.script, agent, mb, args, ent_coef)
        descend(row["losses/value_loss"], critic_of(agent))
    return agent, seen


@with_both_scripts
def test_the_spread_of_actions_stays_within_its_bounds(script):
    """Steps of Adam of 10 would leave [-5, 2]."""
    run = make_run(script, "VectorBox", learning_rate=10.0, max_grad_norm=1e9)
    prepare(run)
    _, agent = run_update(run, 0.01)
    log_std = agent.action_dist.log_std.detach()
    assert -5 <= float(log_std.min()) <= float(log_std.max()) <= 2


@pytest.mark.parametrize(
    ("env", "value_from"), [("VectorMultiDiscrete", "distribution"), ("VectorBox", "mean_head")]
)
def test_the_update_is_the_loop_it_documents(script, env, value_from):
    """Descent by hand on a float64 loss, with and without a KL stop in the middle of an epoch."""
    flags = {"learning_rate": 0.3, "num_minibatches": 4, "update_epochs": 3, "log_std_init": 2.0}
    run = make_run(script, env, value_from=value_from, **flags)
    if env == "VectorBox":
        run.agent.action_dist.clamp_parameters()
    prepare(run)
    free = steps_by_hand(run)
    seen = free[1]
    assert len(seen) == 12
    highest = list(itertools.accumulate(seen, max))
    stop = [i for i in range(1, 12) if seen[i] > 1.05 * highest[i - 1]][-1]
    limit = (seen[stop] + highest[stop - 1]) / 2
    for target_kl, steps in ((None, 12), (limit, stop)):
        expected, seen = steps_by_hand(run, target_kl) if target_kl else free
        run.args.target_kl = target_kl
        metrics, agent = run_update(run, 0.01, torch.optim.SGD)
        assert metrics["policy/kl_max"] == pytest.approx(max(seen), rel=1e-2)
        assert metrics["policy/kl_exact"] == pytest.approx(np.mean(seen), rel=1e-2)
        assert metrics["policy/epochs_done"] == steps / 4
        assert metrics["policy/stopped_early"] == (target_kl is not None)
        for one, two in zip(agent.parameters(), expected.parameters(), strict=True):
            assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_gradient_norms_are_those_of_the_loss(script, value_from):
    """One step on the whole rollout: norms by autograd of the reference, each clipped by itself."""
    flags = {"num_minibatches": 1, "update_epochs": 1, "value_from": value_from}
    run = make_run(script, "VectorDiscrete", **flags)
    run.args.max_grad_norm = 0.05  # below the norm of either part
    batch, agent = prepare(run), copy.deepcopy(run.agent)
    expected = reference(script, agent, batch, run.args, 0.02)
    (expected["loss"] + expected["losses/value_loss"]).backward()
    norm = {
        part: sum(
            float(p.grad.square().sum()) for name, p in agent.named_parameters() if part in name
        )
        ** 0.5
        for part in ("actor", "critic")
    }
    run.args.ent_coef = 0.02
    metrics = script.update(run.agent, run.optimizers, batch, run.args, 0.0)
    assert metrics["grad/actor"] == pytest.approx(norm["actor"], rel=1e-3)
    assert metrics["grad/critic"] == pytest.approx(norm["critic"], rel=1e-3)
    for optimizer in run.optimizers:
        [vector] = optimizer.param_groups[0]["params"]
        assert float(vector.grad.norm()) == pytest.approx(0.05, rel=1e-3)
    assert min(norm.values()) > 0.05


def test_tiny_gradients_are_clipped_as_torch_clips_them(script):
    """A gradient (3, 4) millionths of norm 5e-6 and a limit of 1e-6: torch divides by the norm and
    1e-6 more, which leaves a sixth. Below the limit it stays."""
    x = torch.nn.Parameter(torch.zeros(2))
    gradient = torch.tensor([3e-6, 4e-6])
    for limit, left in ((1e-6, [0.5e-6, 4e-6 / 6]), (1.0, [3e-6, 4e-6])):
        script.take_step(torch.optim.SGD([x], 1.0), gradient, 5e-6, limit)
        assert_close(-x.detach(), torch.tensor(left), rtol=1e-5, atol=0)
        x.data.zero_()


@with_either_value
@pytest.mark.parametrize("name", ["policy_loss", "value_loss"])
def test_the_gradient_is_one_vector_in_the_order_of_the_parameters(run, name):
    """Beside `backward`, which leaves one for each parameter. Nothing keeps a graph."""
    mb, agent = moved(run)
    more = (0.01,) if name == "policy_loss" else ()
    loss_of = getattr(run.script, name)
    parameters = agent.parts()[name == "value_loss"]
    gradient, loss, *others, metrics = run.script.with_gradient(
        loss_of, parameters, agent, mb, run.args, *more
    )
    assert all(p.grad is None for p in agent.parameters())
    expected, *_ = loss_of(agent, mb, run.args, *more)
    expected.backward()
    assert_close(gradient, torch.cat([p.grad.flatten() for p in parameters]))
    assert float(loss) == float(expected.detach())
    assert not any(x.requires_grad for x in (gradient, loss, *others, *metrics.values()))


@pytest.fixture
def two_cores(script, monkeypatch):
    """Two cores for the process, in no container, and networks with long operations, as is said."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(script, "CPU_LIMITS", ())
    monkeypatch.setattr(script.Agent, "second_thread_pays", True)


@pytest.mark.parametrize("target_kl", [None, 1e-4])
def test_two_threads_compute_the_same_bit_for_bit(run, two_cores, monkeypatch, target_kl):
    """Weights, metrics and the state of the generator, with one loop after the other and at once.
    The number of torch's threads holds in the second one, too."""
    used = []
    value_loss = run.script.value_loss

    def look(*inputs):
        used.append((threading.get_ident(), torch.get_num_threads()))
        return value_loss(*inputs)

    monkeypatch.setattr(run.script, "value_loss", look)
    found = []
    for long in (False, True):
        monkeypatch.setattr(run.script.Agent, "second_thread_pays", long)
        metrics, agent = run_update(run, target_kl=target_kl, learning_rate=0.01)
        [(thread, torch_threads)] = set(used)
        assert (thread != threading.get_ident()) == long
        assert torch_threads == torch.get_num_threads()
        used.clear()
        found.append((metrics, agent.state_dict(), torch.get_rng_state()))
    (metrics, weights, rng), (others, other_weights, other_rng) = found
    assert metrics == others
    assert (metrics["policy/stopped_early"] == 1) == (target_kl is not None)
    assert all(torch.equal(x, other_weights[name]) for name, x in weights.items())
    assert torch.equal(rng, other_rng)


@pytest.mark.parametrize("name", ["policy_loss", "value_loss"])
def test_a_fault_in_either_thread_ends_the_update(run, two_cores, monkeypatch, name):
    """It is raised here, and nobody waits for the other loop for ever."""
    monkeypatch.setattr(run.script, name, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_update(run)


def test_one_core_many_processes_or_short_operations_have_one_thread(
    run, two_cores, monkeypatch, tmp_path
):
    """The second of two functions runs in a thread of its own where nothing speaks against it."""
    script = run.script
    container = tmp_path / "cpu.max"  # which may use one core
    container.write_text("100000 100000")

    def apart():
        whose = threading.get_ident
        first, second = script.run_both(whose, whose, run.agent, between=lambda: None)
        assert first == threading.get_ident()
        return first != second

    assert apart()
    for where, attribute, value in (
        (script.Agent, "second_thread_pays", False),
        (script, "WORLD_SIZE", 2),
        (torch, "get_num_threads", lambda: 2),
        (os, "sched_getaffinity", lambda _: {1}),
        (script, "CPU_LIMITS", ([container],)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, attribute, value)
            assert not apart(), attribute
    assert apart()


@pytest.mark.parametrize(("env", "has"), [("VectorBox", False), ("ImageMultiDiscrete", True)])
def test_lstms_and_convolutions_have_long_operations(script, env, has):
    """Ours, measured: small layers alone gain nothing by a second thread."""
    assert make_run(script, env).agent.second_thread_pays == (has or is_recurrent(script))


def test_kl_stop_comes_ahead_of_the_step(run):
    """A limit below 0 stops in the first minibatch: the actor stays, and every metric is there."""
    metrics, agent = run_update(run, target_kl=-1.0)
    for old, new in zip(actor_of(run.agent), actor_of(agent), strict=True):
        assert torch.equal(old, new)
    assert metrics["policy/stopped_early"] == 1
    assert metrics["policy/epochs_done"] == 0
    assert metrics["grad/actor"] == 0
    assert metrics.keys() == run_update(run)[0].keys()


def test_kl_stop_takes_the_steps_before_it(run):
    """After the first step the KL is positive: a tiny limit allows exactly one step."""
    metrics, agent = run_update(run, target_kl=1e-6)
    assert metrics["policy/epochs_done"] == pytest.approx(1 / run.args.num_minibatches)
    assert metrics["policy/stopped_early"] == 1
    assert metrics["policy/kl_max"] > 1e-6
    moved = [not torch.equal(a, b) for a, b in zip(run.agent.parameters(), agent.parameters())]
    assert all(moved)
    again, _ = run_update(run, target_kl=1e6)  # the budget of epochs is not used up for later
    assert again["policy/epochs_done"] == run.args.update_epochs


def test_kl_stop_looks_at_the_exact_divergence(run):
    """Other params of the policy that acted, its log-probabilities as they were: ratios are 1, the
    estimate of the KL is 0, the divergence is not; then the other way round."""
    batch, shift = run.batch, torch.linspace(0, 2, run.batch.params.shape[-1])
    run.batch = batch._replace(params=batch.params + shift)
    metrics, _ = run_update(run, target_kl=0.05)
    assert metrics["losses/approx_kl"] < 1e-6 < 0.05 < metrics["policy/kl_exact"]
    assert metrics["policy/stopped_early"] == 1
    run.batch = batch._replace(log_probs=batch.log_probs - 1)
    metrics, _ = run_update(run, target_kl=0.05, learning_rate=0.0)
    assert metrics["policy/kl_exact"] < 1e-6 < 0.05 < metrics["losses/approx_kl"]
    assert metrics["policy/stopped_early"] == 0


CHANGES = {
    "clip_coef": 1e-3,
    "min_entropy_penalty": 1.0,
    "critic_learning_rate": 1e-4,
    "max_grad_norm": 0.01,
    "update_epochs": 1,
    "num_minibatches": 1,
}


@pytest.mark.parametrize("flag", CHANGES)
def test_a_flag_of_the_update_changes_the_update(run, flag):
    """No option gets lost on the way."""
    floor = {"min_entropy": 5.0}  # above the entropy, so that its penalty can act
    _, base = run_update(run, **floor)
    _, changed = run_update(run, **{**floor, flag: CHANGES[flag]})
    gaps = [(a - b).abs().max() for a, b in zip(base.parameters(), changed.parameters())]
    assert max(gaps) > 0


def actor_of(agent):
    """Parameters of the policy."""
    return [p for name, p in agent.named_parameters() if "critic" not in name]


def critic_of(agent):
    """Parameters of the critics."""
    return [p for name, p in agent.named_parameters() if "critic" in name]


def test_entropy_enters_the_loss_once(script):
    """The entropy of a Gaussian is the sum of its log_std and of constants. So a step down the
    gradient, with a rate of 1, adds the coefficient to each log_std."""
    run = make_run(script, "VectorBox", num_minibatches=1, update_epochs=1, max_grad_norm=1e9)
    prepare(run)
    flags = {"algorithm": torch.optim.SGD, "learning_rate": 1.0}
    without, with_bonus = (
        run_update(run, ent_coef=coef, **flags)[1].action_dist.log_std for coef in (0.0, 0.1)
    )
    assert_close(with_bonus - without, torch.full_like(without, 0.1))


def test_a_single_critic_runs_and_has_no_twin(script):
    """num_critics 1: no difference, every step its own minimum."""
    run = make_run(script, "VectorDiscrete", num_critics=1)
    prepare(run)
    metrics = script.update(run.agent, run.optimizers, run.batch, run.args, 0.0)
    assert len(run.agent.critic_heads) == 1
    assert float(run.metrics["twin/abs_difference"]) == 0
    assert float(run.metrics["twin/critic1_is_min"]) == 1
    assert metrics["twin/loss_1"] == metrics["twin/loss_2"]


@with_either_value
def test_actor_and_critics_do_not_touch_each_other(run):
    """Another rate of the critics moves them alone; another entropy bonus the actor alone."""
    _, base = run_update(run)
    _, slow = run_update(run, critic_learning_rate=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(actor_of(base), actor_of(slow), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(critic_of(base), critic_of(slow), strict=True))
    _, wide = run_update(run, ent_coef=1.0)
    assert all(torch.equal(a, b) for a, b in zip(critic_of(base), critic_of(wide), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(actor_of(base), actor_of(wide), strict=True))


@pytest.mark.parametrize("network", ["actor", "critics"])
def test_steps_of_adam_are_those_that_were_taken(run, network):
    """The rate of the schedule and the counts of both optimizers, after a stop on the way."""
    script, args = run.script, run.args
    args.target_kl, args.critic_learning_rate, args.update_epochs = 1e-6, 3e-3, 3
    metrics = script.update(run.agent, run.optimizers, run.batch, args, 0.25)
    steps = {"actor": 1, "critics": 2}  # one minibatch is looked at and not learnt from
    rates = {"actor": 1e-2, "critics": 3e-3}
    optimizer = getattr(run.optimizers, network)
    [state] = optimizer.state.values()
    assert state["step"] == steps[network]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.75 * rates[network])
    assert metrics["policy/epochs_done"] == 1 / args.num_minibatches


@pytest.mark.parametrize("env", ["VectorDiscrete", "QuadrantUint8First"])
def test_initial_weights_are_orthogonal(script, env):
    """Gains: 1 for the LSTM, 0.01 for the policy, 0.1 for value outputs, sqrt(2) elsewhere. Biases
    are 0, but 0.1 in first layers, of the recurrent script those of the heads and of images."""
    agent = make_agent(script, make_run(script, env).args)
    biases = {name: p for name, p in agent.named_parameters() if "bias" in name}
    above = {name for name, p in biases.items() if p.eq(0.1).all()}
    expected = set()
    if not is_recurrent(script) or env != "VectorDiscrete":
        for body in ("actor_body", "critic_body"):
            expected.add(next(name for name in biases if name.startswith(body)))
    if is_recurrent(script):
        expected |= {"critic_heads.0.0.bias", "critic_heads.1.0.bias"}
    assert above == expected
    gains = {"lstm": 1.0, "actor_head": 0.01}
    gains |= {f"critic_heads.{c}.2": 0.1 for c in range(2)}
    found = []
    for name, p in agent.named_parameters():
        if "bias" in name:
            assert p.eq(0).all() or name in above, name
            continue
        p = p.flatten(1)
        gain = next((g for part, g in gains.items() if part in name), 2**0.5)
        found.append(gain)
        small = p @ p.T if p.shape[0] <= p.shape[1] else p.T @ p
        assert_close(small, gain**2 * torch.eye(len(small)), rtol=1e-4, atol=1e-5)
    assert set(found) == {0.01, 0.1, 2**0.5} | ({1.0} if is_recurrent(script) else set())


@with_either_value
def test_every_term_of_the_loss_goes_the_right_way(run):
    """Repeated updates lower the value loss, raise entropy, lift it to its floor, and follow A."""
    longer = {"update_epochs": 8, "max_grad_norm": 1e9}
    batch, args = run.batch, run.args

    def look(agent):
        return reference(run.script, agent, batch, args, 0.0)

    before = look(run.agent)
    _, agent = run_update(run, **longer)
    for tag in ("twin/loss_1", "twin/loss_2"):
        assert look(agent)[tag] < before[tag]
    for flags in ({"ent_coef": 10.0}, {"min_entropy": 99.0, "min_entropy_penalty": 10.0}):
        _, agent = run_update(run, **longer, **flags)
        assert look(agent)["losses/entropy"] > before["losses/entropy"] + 0.02
    _, agent = run_update(run, **longer, clip_coef=10.0)
    log_prob, _ = policy_terms(policy_params(agent, batch), batch.actions)
    assert ((log_prob - batch.log_probs) * batch.advantages).mean() > 0.01


def test_gradient_norms_are_means_over_the_steps(run):
    """Weights standing still, one epoch of the whole batch or three: the same norms."""
    flags = {"learning_rate": 0.0, "num_minibatches": 1}
    one, _ = run_update(run, update_epochs=1, **flags)
    three, _ = run_update(run, update_epochs=3, **flags)
    for tag in ("grad/actor", "grad/critic"):
        assert three[tag] == pytest.approx(one[tag], rel=1e-4)


def test_first_minibatch_error_is_the_largest_deviation(run):
    """One stored log-probability 0.1 too low: that ratio is e^0.1 ahead of the first step."""
    log_probs = run.batch.log_probs.clone()
    log_probs.view(-1)[0] -= 0.1
    run.batch = run.batch._replace(log_probs=log_probs)
    metrics, _ = run_update(run, num_minibatches=1, learning_rate=0.0)
    error, n = 2.718281828**0.1 - 1, log_probs.numel()
    assert metrics["policy/ratio_first_minibatch_error"] == pytest.approx(error, rel=1e-3)
    assert metrics["policy/ratio_mean"] == pytest.approx(1 + error / n, rel=1e-5)
    spread = error * ((1 / n) * (1 - 1 / n)) ** 0.5  # of one entry among n
    assert metrics["policy/ratio_std"] == pytest.approx(spread, rel=1e-3)
    assert metrics["policy/kl_max"] < 1e-6
    text = "policy/ratio_first_minibatch_error 0.11: the policy that"
    assert metrics["warning/ratio"].startswith(text)


def test_a_policy_that_acted_as_it_trains_is_not_warned_of(run):
    """Rounding is no fault."""
    assert "warning/ratio" not in run_update(run, num_minibatches=1)[0]


def watch_losses(monkeypatch, script):
    """Advantages that the policy's loss is given, minibatch after minibatch."""
    given, policy_loss = [], script.policy_loss

    def look(agent, mb, *rest):
        given.append(mb.advantages)
        return policy_loss(agent, mb, *rest)

    monkeypatch.setattr(script, "policy_loss", look)
    return given


@pytest.mark.parametrize("norm_adv", [True, False])
def test_the_policy_learns_from_normalised_advantages(script, monkeypatch, norm_adv):
    """Of the whole rollout, in float32, with metrics of both; or as they are."""
    run = make_run(script, "VectorDiscrete", norm_adv=norm_adv, num_minibatches=1)
    raw = prepare_raw(run).advantages
    assert raw.dtype == torch.float64
    expected = (raw - raw.mean()) / raw.std(correction=0) if norm_adv else raw
    given = watch_losses(monkeypatch, script)
    metrics = script.update(run.agent, run.optimizers, run.batch, run.args, 0.0)
    for found in given:
        assert found.dtype == torch.float32
        assert_close(found.sort(-1).values.double().sum(), expected.sum(), rtol=1e-4, atol=1e-4)
        assert_close(found.flatten().sort()[0], expected.float().flatten().sort()[0])
    assert metrics["adv/mean_raw"] == pytest.approx(float(raw.mean()))
    assert metrics["adv/std_raw"] == pytest.approx(float(raw.std(correction=0)))
    assert metrics["adv/std"] == pytest.approx(float(expected.std(correction=0)))
    assert metrics["adv/abs_max"] == pytest.approx(float(expected.abs().max()))


def test_advantages_are_normalised_over_the_rollout_and_not_a_minibatch(script, monkeypatch):
    """Four minibatches have mean 0 and std 1 together; none of them has by itself."""
    run = make_run(script, "VectorDiscrete", num_minibatches=4, update_epochs=1)
    prepare_raw(run)
    given = watch_losses(monkeypatch, script)
    script.update(run.agent, run.optimizers, run.batch, run.args, 0.0)
    assert len(given) == 4
    whole = torch.stack(given).double()
    assert float(whole.mean()) == pytest.approx(0, abs=1e-6)
    assert float(whole.std(correction=0)) == pytest.approx(1, rel=1e-6)
    assert all(abs(float(x.mean())) > 1e-3 for x in given)
    assert all(abs(float(x.std(correction=0)) - 1) > 1e-3 for x in given)


@pytest.mark.parametrize(("memory", "share"), [(10, 2**0.5 * 1e-6), (0, 1.0)])
def test_rounding_noise_is_no_gradient(script, monkeypatch, memory, share):
    """Ours: after a rollout of advantages, one of a millionth of them. The running variance is the
    mean of two, of which one is nothing. Without a memory the noise counts in full."""
    run = make_run(script, "VectorDiscrete", norm_adv_memory=memory, learning_rate=1e-3)
    batch = prepare_raw(run)
    script.update(run.agent, run.optimizers, batch, run.args, 0.0)
    given = watch_losses(monkeypatch, script)
    tiny = batch._replace(advantages=1e-6 * batch.advantages)
    metrics = script.update(run.agent, run.optimizers, tiny, run.args, 0.0)
    epoch = torch.cat([x.flatten() for x in given[: run.args.num_minibatches]])
    assert float(epoch.double().std(correction=0)) == pytest.approx(share, rel=1e-3)
    assert metrics["adv/std"] == pytest.approx(share, rel=1e-3)
    for optimizer in run.optimizers:  # the rates are those of the schedule in any case
        assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(("memory", "least", "most"), [(100, 0.0, 0.04), (0, 0.3, 2.0)])
def test_steps_without_a_signal_become_short(script, memory, least, most):
    """Adam undoes any scale of a gradient, but not one that falls. After a step of gradient g and
    thirty of almost nothing its mean is 0.1 * 0.9^30 g / (1 - 0.9^31) = 0.0044 g, and its root mean
    square (0.001 * 0.999^30 / (1 - 0.999^31))^0.5 g = 0.178 g: 0.025 of the first step. Without a
    memory of the advantages noise is scaled up, and steps stay as long."""
    sizes = {"num_minibatches": 1, "update_epochs": 1, "max_grad_norm": 1e9}
    run = make_run(script, "VectorDiscrete", norm_adv_memory=memory, learning_rate=1e-3, **sizes)
    batch = prepare_raw(run)
    lengths = []
    for i in range(31):
        before = [p.detach().clone() for p in actor_of(run.agent)]
        given = batch if i == 0 else batch._replace(advantages=1e-9 * batch.advantages)
        script.update(run.agent, run.optimizers, given, run.args, 0.0)
        moves = [(p - q).flatten() for p, q in zip(actor_of(run.agent), before, strict=True)]
        lengths.append(float(torch.cat(moves).detach().norm()))
    assert least <= lengths[-1] / lengths[0] < most


def test_hundreds_of_updates_on_returns_that_hardly_vary(script, value_from):
    """Spreads from 0 to 1e-3 around 1: everything stays finite."""
    sizes = {"num_envs": 2, "num_steps": 3, "hidden_size": 3, "lstm_hidden_size": 2}
    sizes |= {"num_quantiles": 3, "num_atoms": 5, "num_minibatches": 1, "update_epochs": 1}
    run = make_run(script, "ConstantReward", value_from=value_from, **sizes)
    rollout = roll(run)
    assert rollout.terminated.all()  # a step's return is its reward
    for i in range(15):
        spread = (0.0, 1e-12, 1e-9, 1e-6, 1e-3)[i % 5]
        rewards = 1 + spread * torch.randn(rollout.rewards.shape, dtype=torch.float64)
        run.rollout = rollout._replace(rewards=rewards)
        batch, _, metrics = prepare_rollout(run)
        for _ in range(5):
            metrics |= script.update(run.agent, run.optimizers, batch, run.args, 0.01)
            metrics.pop("warning/ratio", "")  # in later updates the policy has moved since it acted
            scalars = torch.tensor([float(x) for x in metrics.values() if np.ndim(x) == 0])
            assert scalars.isfinite().all(), i
    assert all(x.isfinite().all() for x in run.agent.state_dict().values())
    assert float(metrics["losses/value_loss"]) < 5


def test_no_output_is_left_behind_by_the_scale(script, value_from):
    """Returns of 1, which one critic predicts; the other says 11. The scale may not shrink ahead of
    it: at hundreds of deviations its loss would drown that of the policy."""
    run = make_run(script, "ConstantReward", value_from=value_from)
    moments, first = run.agent.value_dist.moments, 0 if is_recurrent(script) else 11
    for head, says in zip(run.agent.critic_heads, (1, 11)):
        head[-1].weight.data[first:].zero_()
        head[-1].bias.data[first:] = float((says - moments.mean) / moments.std)
    roll(run)
    for _ in range(150):
        batch, _, _ = prepare_rollout(run)
    assert batch.old_predictions.abs().max() < 20


def test_what_is_not_finite_is_raised_ahead_of_the_kl_stop(script, monkeypatch):
    """An infinite divergence must not end the update in silence where the loss is lost, too."""
    run = make_run(script, "VectorDiscrete", target_kl=0.01)
    prepare(run)
    original = script.policy_loss

    def broken(*given):
        loss, kl, metrics = original(*given)
        return loss * torch.nan, torch.full_like(kl, torch.inf), metrics

    monkeypatch.setattr(script, "policy_loss", broken)
    with pytest.raises(script.NotFinite, match="not finite"):
        script.update(run.agent, run.optimizers, run.batch, run.args, 0.0)


# ---- two processes
def in_two_processes(monkeypatch, script, work):
    """What `work(0)` and `work(1)` give. Threads stand for processes: they meet in `average`."""
    meeting, handed, rank = threading.Barrier(2, timeout=20), {}, threading.local()

    def average(x):
        handed[rank.number] = x
        meeting.wait()
        mean = (handed[0] + handed[1]) / 2
        meeting.wait()  # both have the mean before either hands in the next
        return mean

    def start(number):
        rank.number = number
        return work(number)

    monkeypatch.setattr(script, "average", average)
    monkeypatch.setattr(script.Agent, "second_thread_pays", False)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def halves_of(run):
    """The rows or sequences of the run's batch in two parts."""
    axis = int(is_recurrent(run.script))
    return [type(run.batch)(*part) for part in zip(*(x.chunk(2, axis) for x in run.batch))]


@pytest.mark.parametrize(("share", "steps"), [(0.25, 0), (0.75, 2)])
def test_two_processes_step_and_stop_as_one(run, monkeypatch, share, steps):
    """The first has all of the divergence d and large advantages. The mean KL is d / 2: a limit of
    d / 4 stops both, one of 3 d / 4 neither. Weights are those of one process with all rows."""
    script, axis = run.script, int(is_recurrent(run.script))
    one, two = halves_of(run)
    shift = torch.linspace(0, 2, one.params.shape[-1])
    one = one._replace(params=one.params + shift, advantages=100 * one.advantages + 30)
    whole = type(one)(*(torch.cat(pair, axis) for pair in zip(one, two)))
    run.agent.adv_moments.merge(torch.zeros(()), torch.tensor(1e6), weight=1)
    flags = {"norm_adv": True, "num_minibatches": 1, "update_epochs": 2, "learning_rate": 0.1}
    flags["algorithm"] = torch.optim.SGD
    d = run_update(run, batch=one, **flags | {"target_kl": 1e-9})[0]["policy/kl_exact"]
    flags["target_kl"] = share * d
    expected, same = run_update(run, batch=whole, **flags)
    assert expected["policy/epochs_done"] == steps
    assert 0.01 < expected["adv/std"] < 0.5
    for metrics, agent in in_two_processes(
        monkeypatch, script, lambda number: run_update(run, batch=(one, two)[number], **flags)
    ):
        for tag in ("policy/epochs_done", "grad/actor", "grad/critic"):
            assert metrics[tag] == pytest.approx(expected[tag], rel=1e-4), tag
        for a, b in zip(agent.parameters(), same.parameters(), strict=True):
            assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["policy_loss", "value_loss"])
def test_both_processes_end_where_one_has_no_finite_loss(run, monkeypatch, name):
    """The loss of the first is infinite, with a finite gradient. Neither may go on without it."""
    script, loss_of = run.script, getattr(run.script, name)
    one, two = halves_of(run)
    one = one._replace(obs=one.obs + 100)  # a mark

    def broken(agent, mb, *rest):
        loss, *more = loss_of(agent, mb, *rest)
        return (loss + (torch.inf if mb.obs.max() > 50 else 0), *more)

    def work(number):
        with pytest.raises(script.NotFinite, match="loss inf"):
            run_update(run, batch=(one, two)[number], num_minibatches=1)
        return True

    monkeypatch.setattr(script, name, broken)
    assert in_two_processes(monkeypatch, script, work) == [True, True]


@pytest.mark.parametrize("scale", [0, 100])
def test_two_processes_have_the_return_statistics_of_one(script, monkeypatch, scale):
    """The mean and, whichever is larger, the spread of the targets (scale 0) or the error of V."""
    returns = torch.tensor([[0.0, 1, 4, 11]], dtype=torch.float64)

    def move(part):
        dist = script.ValueDistribution(small_args(script, "Walk"))
        outputs = torch.zeros(2, 1, 4, dist.num_outputs)
        outputs[..., -1] = scale * torch.arange(1.0, 5)
        targets = dist.point_targets(returns[:, part])
        dist.move_statistics(torch.nn.ModuleList(), outputs[:, :, part], targets)
        return float(dist.moments.mean), float(dist.moments.var)

    expected = move(slice(0, 4))
    found = in_two_processes(monkeypatch, script, lambda i: move(slice(2 * i, 2 * i + 2)))
    assert found == [pytest.approx(expected)] * 2


def test_two_processes_warn_of_the_same_share_beyond_the_atoms(monkeypatch):
    """The first has 0 and 0, the second 0 and 100, which is beyond the atoms: a quarter of all. One
    process speaks, and its own share may be none."""
    import distributional_ppo_categorical as script

    returns = torch.tensor([[0.0, 0, 0, 100]], dtype=torch.float64)

    def describe(number):
        dist = script.ValueDistribution(small_args(script, "Walk", norm_returns=False))
        part = slice(2 * number, 2 * number + 2)
        return dist.describe_statistics(dist.point_targets(returns[:, part]), torch.zeros(1))

    for metrics in in_two_processes(monkeypatch, script, describe):
        assert float(metrics["value/outside_support"]) == 0.25
        assert (
            "25.0% of the targets' mass is beyond the atoms" in metrics["warning/outside_support"]
        )


@pytest.mark.parametrize(
    ("part", "owner", "flag"),
    [
        ("actor_head", "actor's", "--learning-rate"),
        ("critic_heads.0", "critics'", "--critic-learning-rate"),
    ],
)
def test_a_gradient_that_is_not_finite_is_named_ahead_of_its_step(run, part, owner, flag):
    """With its minibatch and the rate that may be too large; the loss itself is finite."""
    *_, p = (p for name, p in run.agent.named_parameters() if name.startswith(part))
    p.register_hook(lambda gradient: gradient * torch.inf)
    said = (
        f"gradient (inf|nan) of minibatch 0 of the {owner} update: not finite; try a smaller {flag}"
    )
    with pytest.raises(run.script.NotFinite, match=said):
        run.script.update(run.agent, run.optimizers, run.batch, run.args, 0.0)


def test_encoders_have_their_layers(script):
    """Two hidden layers, or one ahead of an LSTM; behind convolutions one."""
    hidden = 1 if hasattr(script, "Carry") else 2
    cases = (
        ("VectorDiscrete", ["Linear", "Tanh"] * hidden),
        ("QuadrantUint8First", ["Convolutions", "Linear", "Tanh"]),
    )
    for env, expected in cases:
        agent = make_agent(script, small_args(script, env, activation="tanh"))
        for body in (agent.actor_body, agent.critic_body):
            layers = getattr(body, "encoder", body)
            assert [type(layer).__name__ for layer in layers] == expected
            linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
            assert {layer.out_features for layer in linear} == {6}


def test_the_entropy_coefficient_is_not_compiled_in(monkeypatch):
    """A schedule changes it in every update; a number would be compiled anew each time."""
    import distributional_ppo_categorical as script

    run, given, policy_loss = make_run(script, "Counter"), [], script.policy_loss

    def look(agent, mb, args, ent_coef):
        given.append(ent_coef)
        return policy_loss(agent, mb, args, ent_coef)

    monkeypatch.setattr(script, "policy_loss", look)
    script.update(run.agent, run.optimizers, prepare_raw(run), run.args, 0.5)
    assert given
    assert all(isinstance(coef, torch.Tensor) for coef in given)


@pytest.mark.parametrize("flag", ["cuda", "compile"])
def test_a_gpu_and_a_compiler_have_one_thread(script, flag):
    """Neither gains by a second one."""
    run = make_run(script, "ImageMultiDiscrete")
    if not hasattr(run.args, flag):
        pytest.skip("a flag of the other script")
    assert run.agent.second_thread_pays
    setattr(run.agent.args, flag, True)
    assert not run.agent.second_thread_pays


def test_parameters_that_a_loss_does_not_use_have_a_gradient_of_0(script):
    """One vector for all of them, in their order."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    gradient, *_ = script.with_gradient(lambda: (x.sum(), {}), [x, y])
    assert gradient.tolist() == [1, 1, 0, 0, 0]


def test_the_second_thread_is_told_the_number_of_torch_s_threads(script, two_cores, monkeypatch):
    """Torch would take all cores there. Asking there would set it, so the call is looked at."""
    told = []
    monkeypatch.setattr(torch, "set_num_threads", lambda n: told.append((threading.get_ident(), n)))
    agent = make_agent(script, small_args(script, "VectorBox"))
    told.clear()
    whose = threading.get_ident
    places = {*script.run_both(whose, whose, agent, between=lambda: None)}
    [other] = places - {threading.get_ident()}
    assert told == [(other, torch.get_num_threads())]


def test_a_stop_leaves_later_updates_their_epochs(run):
    """The same flags and the same agent, first with a tiny limit and then without one."""
    before = dict(vars(run.args))
    epochs = []
    for run.args.target_kl in (1e-6, 1e6):
        metrics = run.script.update(run.agent, run.optimizers, run.batch, run.args, 0.0)
        epochs.append(metrics["policy/epochs_done"])
    assert epochs == [pytest.approx(1 / run.args.num_minibatches), run.args.update_epochs]
    assert vars(run.args) | {"target_kl": None} == before | {"target_kl": None}
