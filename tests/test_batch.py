"""The batch made of a rollout: risk term, targets, statistics that move."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import make_run, prepare, roll
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm


def test_the_risk_term_reaches_the_policy_and_not_the_critics(script):
    """One batch: advantages (1 - w) A_gae + w A_cvar, targets and old values bit-equal."""
    batches, raw = {}, {}
    for weight in (0.0, 0.4, 1.0):
        facts = {"norm_adv": False, "value_target": "sr_lambda", "cvar_alpha": 0.3}
        one = make_run(script, "Counter", cvar_weight=weight, **facts)
        torch.manual_seed(0)
        roll(one)
        torch.manual_seed(1)
        batch, _, metrics = script.prepare_batch(one.agent, one.rollout, one.carry, one.args)
        assert metrics["cvar/weight"] == weight
        batches[weight], raw[weight] = batch, batch.advantages
    assert_close(raw[0.4], 0.6 * raw[0.0] + 0.4 * raw[1.0], rtol=1e-4, atol=1e-3)
    assert (raw[0.0] - raw[1.0]).abs().max() > 1
    for weight in (0.4, 1.0):
        assert torch.equal(batches[weight].targets, batches[0.0].targets)
        assert torch.equal(batches[weight].old, batches[0.0].old)


def test_sr_lambda_trains_on_its_samples(script):
    """The batch holds a distribution for each step that goes on, not the lambda-return alone."""
    encoded = {}
    for target in ("lambda_return", "sr_lambda"):
        facts = {"target_encoding": "two_hot", "gamma": 0.95, "gae_lambda": 0.5}
        one = make_run(script, "Counter", value_target=target, **facts)
        encoded[target] = prepare(one).targets
        out = script.update(one.agent, one.optimizer, one.batch, one.args, 0.0)
        assert math.isfinite(out["losses/value_loss"])
    if script is lstm:
        assert [x.shape[-1] for x in encoded.values()] == [1, 7]
        varied = encoded["sr_lambda"].std(-1) > 0
    else:  # a point takes two atoms
        assert (encoded["lambda_return"] > 1e-6).sum(-1).max() <= 2
        varied = (encoded["sr_lambda"] > 1e-6).sum(-1) > 2
    assert 0.3 < varied.float().mean() < 1  # after a termination one value is left


def test_moving_statistics_are_logged_as_the_jump_they_are():
    """Outputs stay; old means are kept in the new units; the jump of decoded means is reported."""
    run = make_run(categorical, "Counter", num_atoms=21)
    prepare(run)
    moments = run.agent.dist.moments
    before = (moments.mean.clone(), moments.std.clone())
    batch = prepare(run)
    outputs = run.agent.critic(batch.obs, batch.critic_state, batch.episode_start)
    mean = outputs.softmax(-1) @ run.agent.dist.support
    was = mean * before[1] + before[0]
    now = mean * moments.std + moments.mean
    assert float(run.metrics["norm/value_shift"]) == pytest.approx(
        float((now - was).detach().abs().mean()), rel=1e-4
    )
    assert run.metrics["norm/value_shift"] > 0.1
    kept = moments.denormalize(batch.old.movedim(2, 0)[..., 0].double())
    assert_close(kept, was.double().detach(), rtol=1e-4, atol=1e-3)


def test_the_share_outside_is_that_of_what_the_critics_train_on():
    """Returns in the thousands are inside the support once the statistics have taken them in."""
    run = make_run(categorical, "Counter", num_atoms=21)
    run.agent.dist.moments.mean += 1e5
    run.agent.dist.moments.count.zero_()  # the first update replaces these statistics
    prepare(run)
    assert run.metrics["value/outside_support"] < 0.1
