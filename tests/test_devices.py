"""No tensor is made on the CPU by mistake: torch's meta device has no data, and refuses a mix."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    is_recurrent,
    make_run,
    policy_params,
    prepare,
    small_args,
    value_outputs,
)

FLAGS = {
    "plain": {},
    "clipped": {"vf_clip": "mean_only"},
    "floor": {"ent_coef": 0.01, "min_entropy": 0.5, "min_entropy_penalty": 0.1},
    "samples": {"value_target": "sr_lambda", "twin_reduce": "mean"},
    "distribution": {"value_from": "distribution", "num_critics": 1},
}
QUANTILES = {
    "pinball": {"kappa": 0.0},
    "each": {"vf_clip": "per_quantile"},
    "variance": {"vf_clip": "mean_and_variance"},
}
ATOMS = {"two_hot": {"target_encoding": "two_hot"}}


def on_meta(script, run, batch):
    """The agent and the batch on the meta device."""
    agent = copy.deepcopy(run.agent).to("meta")
    return agent, script.Batch(*(x.to("meta") for x in batch))


ENVS = [
    "VectorBox",
    pytest.param("VectorDiscrete", marks=pytest.mark.slow),
    pytest.param("ImageMultiDiscrete", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("kind", [*FLAGS, *QUANTILES, *ATOMS])
def test_losses_stay_on_their_device(script, env, kind):
    """Both losses, their gradients and their metrics."""
    foreign = ATOMS if is_recurrent(script) else QUANTILES
    if kind in foreign:
        pytest.skip("a flag of the other script")
    run = make_run(script, env, num_steps=4, **(FLAGS | QUANTILES | ATOMS)[kind])
    agent, batch = on_meta(script, run, prepare(run))
    if is_recurrent(script):  # where episodes open decides how time is cut: that has data
        batch = batch._replace(episode_start=torch.zeros(batch.episode_start.shape, dtype=bool))
    loss, kl, metrics = script.policy_loss(agent, batch, run.args, run.args.ent_coef)
    loss.backward()
    value_loss, more = script.value_loss(agent, batch, run.args)
    value_loss.backward()
    for x in (loss, kl, value_loss, *metrics.values(), *more.values()):
        assert x.device.type == "meta"
    assert all(p.grad is not None for p in agent.parameters())


@pytest.mark.parametrize("env", ["VectorDiscrete", "VectorBox", "ImageMultiDiscrete"])
@pytest.mark.parametrize("kind", ["plain", "samples", "distribution"])
def test_values_stay_on_their_device(script, env, kind):
    """Observations are normalised, outputs reduced, decoded and turned into targets and advantages
    of risk."""
    run = make_run(script, env, num_steps=4, **FLAGS[kind])
    agent, batch = on_meta(script, run, prepare(run))
    if is_recurrent(script):
        batch = batch._replace(episode_start=torch.zeros(batch.episode_start.shape, dtype=bool))
    dist = agent.value_dist
    params = policy_params(agent, batch)
    outputs = dist.reduce_twins(value_outputs(agent, batch))
    values = dist.value(outputs)
    targets = dist.point_targets(values)
    found = [
        agent.normalize_obs(run.rollout.obs.to("meta")),
        agent.action_dist.entropy(params),
        dist.quantile(outputs, 0.3),
        dist.mean(outputs),
        dist.encode_targets(targets),
        dist.risk_advantages(targets, outputs),
        *dist.describe(outputs, targets).values(),
    ]
    assert {x.device.type for x in found} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("env", ["VectorBox", "ImageMultiDiscrete"])
@pytest.mark.parametrize("kind", [*FLAGS, *QUANTILES, *ATOMS])
def test_a_gpu_gives_what_a_cpu_gives(script, tmp_path, env, kind):
    """The metrics of one iteration agree but for rounding: minibatches and samples are the same."""
    foreign = ATOMS if is_recurrent(script) else QUANTILES
    if kind in foreign:
        pytest.skip("a flag of the other script")
    flags = (FLAGS | QUANTILES | ATOMS)[kind] | {"total_timesteps": 48, "run_dir": str(tmp_path)}
    cpu, gpu = (script.train(small_args(script, env, **flags, cuda=cuda)) for cuda in (False, True))
    assert gpu.keys() == cpu.keys()
    clocks = ("time/", "charts/SPS", "run_dir")
    for tag in cpu:
        if not tag.startswith(clocks):
            assert gpu[tag] == pytest.approx(cpu[tag], rel=1e-2, abs=1e-3), tag
