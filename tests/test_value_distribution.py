"""What the loop asks of a value distribution, of quantiles and of atoms.

Reduction of twins, description, targets, loss and clipping, statistics that move.
"""

from __future__ import annotations

import copy
import itertools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_agent, small_args
from torch import Tensor, nn
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm

REDUCTIONS = ("min", "mean")
CLIPPINGS = ("per_quantile", "mean_only", "mean_and_variance")
VALUE_FROM = ("distribution", "mean_head")
MEAN_HEAD = {"value_from": "mean_head"}


def quantiles(**flags: Any) -> lstm.ValueDistribution:
    """Three quantiles, V their mean, and some flags."""
    flags = {"num_quantiles": 3, "value_from": "distribution"} | flags
    return lstm.ValueDistribution(small_args(lstm, "Counter", **flags))


def atoms(**flags: Any) -> categorical.ValueDistribution:
    """Five atoms from -1 to 3, V their mean, and some flags."""
    flags = {"num_atoms": 5, "v_min": -1.0, "v_max": 3.0, "value_from": "distribution"} | flags
    return categorical.ValueDistribution(small_args(categorical, "Counter", **flags))


def of(script: ModuleType, **flags: Any) -> Any:
    """Either of them, with K outputs, or K + 1 by `MEAN_HEAD`."""
    return quantiles(**flags) if script is lstm else atoms(**flags)


def loss_of(dist: Any, outputs: Tensor, targets: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of distributions alone: without a V of its own, returns are not looked at."""
    returns = torch.full(targets.shape[:-1], torch.nan)
    return dist.loss(outputs, targets, returns, old)


def set_units(dist: Any, mean: float, std: float) -> None:
    """Returns have this mean and this standard deviation."""
    dist.moments.mean.fill_(mean)
    dist.moments.var.fill_(std**2)


def targets_of(dist: Any, samples: Tensor, weights: Tensor) -> Any:
    """Targets as the kind has them: equally likely samples, or returns with their weights."""
    if isinstance(dist, lstm.ValueDistribution):
        return samples
    return categorical.WeightedReturns(samples, weights)


def encode(dist: Any, samples: Tensor, weights: Tensor) -> Tensor:
    """What the loss regresses on."""
    return dist.encode_targets(targets_of(dist, samples, weights))


def move_to(
    dist: Any, heads: nn.ModuleList, outputs: Tensor, returns: Tensor
) -> tuple[Tensor, dict]:
    """Old values and metrics of a move of the statistics to these returns."""
    return dist.move_statistics(heads, outputs, dist.point_targets(returns))


def describe(dist: Any, outputs: Tensor, outcome: float = 0.0) -> dict[str, Tensor]:
    """The description of predictions beside one certain outcome, under short names."""
    samples = torch.full((*outputs.shape[:-1], 1), outcome, dtype=torch.float64)
    facts = dist.describe(outputs, targets_of(dist, samples, torch.ones_like(samples)))
    names = {
        "p10": "value/p10", "p50": "value/p50", "p90": "value/p90",
        "cvar": "cvar/predicted", "std": "value/std_predicted", "coverage": "cvar/coverage",
    }  # fmt: skip
    return {short: facts[tag] for short, tag in names.items()}


def stats(dist: Any, outputs: Tensor) -> dict[str, float]:
    """The description without the coverage."""
    facts = floats(describe(dist, outputs))
    del facts["coverage"]
    return facts


def value_at_risk_is(dist: Any, outputs: Tensor, expected: float) -> bool:
    """An outcome counts as covered exactly up to the predicted value at risk."""
    below = describe(dist, outputs, expected - 1e-5)["coverage"]
    above = describe(dist, outputs, expected + 1e-5)["coverage"]
    return float(below) == 1 and float(above) == 0


def floats(facts: dict[str, Tensor]) -> dict[str, float]:
    return {key: float(value) for key, value in facts.items()}


def in_units(facts: dict[str, float], mean: float, std: float) -> dict[str, float]:
    """The same description where returns have this mean and this standard deviation."""
    return {key: std * x + (0 if key == "std" else mean) for key, x in facts.items()}


# -------------------------------------------------------------------------- quantiles: twin critics
# Two critics, two states, three quantiles. Means: critic 1 has 2 and 3, critic 2 has 3 and 2.
TWIN_QUANTILES = torch.tensor(
    [[[0.0, 1.0, 5.0], [4.0, 2.0, 3.0]], [[3.0, 2.0, 4.0], [1.0, 6.0, -1.0]]]
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # the critic with the smaller mean, its quantiles as they are
        ("min", [[0, 1, 5], [1, 6, -1]]),
        # pooled and sorted: 0 1 2 3 4 5 and -1 1 2 3 4 6; neighbours averaged
        ("mean", [[0.5, 2.5, 4.5], [0, 2.5, 5]]),
    ],
)
def test_reduction_of_twin_quantiles_by_hand(mode, expected):
    """Fujimoto et al. 2018 (TD3) for `min`, the others ours: each mode, state by state."""
    reduced = quantiles(twin_reduce=mode).reduce_twins(TWIN_QUANTILES)
    assert_close(reduced, torch.tensor(expected, dtype=torch.float32))


def test_equal_means_are_the_first_critic_s():
    """Fujimoto et al. 2018 (TD3): a tie of the twins goes to critic 1 (ours)."""
    outputs = torch.tensor([[[0.0, 4.0]], [[1.0, 3.0]]])
    reduced = quantiles(twin_reduce="min", num_quantiles=2).reduce_twins(outputs)
    assert reduced.tolist() == [[0.0, 4.0]]


def reduced_values(script: ModuleType, outputs: Tensor, **flags: Any) -> dict[str, Tensor]:
    """The value of the reduced distribution by every mode."""
    values = {}
    for mode in REDUCTIONS:
        dist = of(script, twin_reduce=mode, **flags)
        values[mode] = dist.mean(dist.reduce_twins(outputs))
    return values


def test_order_of_the_reductions(script):
    """Ours, after Fujimoto et al. 2018: the minimum of means <= the mean of means."""
    outputs = torch.randn(2, 50, 4, 7)
    value = reduced_values(script, outputs, num_quantiles=7, num_atoms=7)
    assert all(x.shape == (50, 4) for x in value.values())
    assert (value["min"] <= value["mean"] + 1e-6).all()
    assert value["min"].mean() < value["mean"].mean() - 0.05


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_v_of_the_reduced_twins(script, mode):
    """Fujimoto et al. 2018 (TD3) for the minimum of two V's; ours: their mean. In any units.

    Of atoms V is the mean and a tenth of the output.
    """
    dist = of(script, twin_reduce=mode, num_quantiles=5, **MEAN_HEAD)
    set_units(dist, 100, 2)
    outputs = torch.randn(2, 50, 4, 6)
    v = outputs[..., 5]
    if script is categorical:
        probs = outputs[..., :5].softmax(-1)
        v = 0.1 * v + probs @ dist.support
    expected = v.mean(0) if mode == "mean" else v.amin(0)
    assert_close(dist.value(dist.reduce_twins(outputs)), 100 + 2 * expected.double())


def test_value_of_the_reduced_twins(script):
    """Fujimoto et al. 2018 (TD3): the minimum of two means; ours: the mean of two means."""
    outputs = torch.randn(2, 50, 4, 7)
    value = reduced_values(script, outputs, num_quantiles=7, num_atoms=7)
    means = outputs.double().mean(-1)
    if script is categorical:
        means = outputs.double().softmax(-1) @ torch.linspace(-1, 3, 7).double()
    assert_close(value["min"], means.amin(0))
    assert_close(value["mean"], means.mean(0), rtol=0, atol=1e-6)  # through logarithms


@pytest.mark.parametrize("value_from", VALUE_FROM)
@pytest.mark.parametrize("mode", REDUCTIONS)
def test_one_critic_is_its_own_reduction(script, mode, value_from):
    """Ours: nothing to reduce, bit for bit."""
    flags = {"num_quantiles": 7, "num_atoms": 7, "value_from": value_from}
    dist = of(script, twin_reduce=mode, num_critics=1, **flags)
    outputs = torch.randn(1, 5, dist.num_outputs)
    assert torch.equal(dist.reduce_twins(outputs), outputs[0])


# ------------------------------------------------------------------------------ atoms: twin critics
TWIN_PROBS = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1], [0.3, 0.1, 0.1, 0.1, 0.4]])  # means 1.0, 1.2


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min", [0.1, 0.2, 0.4, 0.2, 0.1]),
        ("mean", [0.2, 0.15, 0.25, 0.15, 0.25]),
    ],
)
def test_reduction_of_twin_atoms_by_hand(mode, expected, order):
    """Fujimoto et al. 2018 (TD3) for `min`, the others ours: logits of the reduced distribution."""
    reduced = atoms(twin_reduce=mode).reduce_twins(TWIN_PROBS[order].log())
    assert_close(reduced.softmax(-1), torch.tensor(expected))


@pytest.mark.parametrize("value_from", VALUE_FROM)
@pytest.mark.parametrize("mode", REDUCTIONS)
def test_states_of_a_rollout_are_reduced_one_by_one(script, mode, value_from):
    """Fujimoto et al. 2018 (TD3) for `min`, the others ours: (C, T, N, K), each (t, n) alone."""
    dist = of(script, twin_reduce=mode, num_quantiles=5, value_from=value_from)
    outputs = torch.randn(2, 3, 4, dist.num_outputs)
    reduced = dist.reduce_twins(outputs)
    for t, n in itertools.product(range(3), range(4)):
        assert_close(reduced[t, n], dist.reduce_twins(outputs[:, t, n]))


# ---------------------------------------------------------------------------- a V of its own: twins
def with_v(outputs: Tensor, values: list) -> Tensor:
    """Outputs with these V's as the last one, (..., K) -> (..., K + 1)."""
    return torch.cat((outputs, torch.tensor(values)[..., None].to(outputs)), -1)


# V's of the twins at the two states; they contradict the means, 2 and 3 against 3 and 2.
TWIN_VALUES = [[8.0, -1.0], [7.0, 0.5]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # whole critics by their V's: critic 2 at the first state (7 < 8), critic 1 at the second
        ("min", [[3, 2, 4, 7], [4, 2, 3, -1]]),
        # the quantiles pooled as without V's, and (8 + 7) / 2, (-1 + 0.5) / 2
        ("mean", [[0.5, 2.5, 4.5, 7.5], [0, 2.5, 5, -0.25]]),
    ],
)
def test_reduction_of_twin_quantiles_with_v_by_hand(mode, expected):
    """Fujimoto et al. 2018 (TD3) for `min`, the others ours: V's and quantiles are not mixed."""
    dist = quantiles(twin_reduce=mode, **MEAN_HEAD)
    reduced = dist.reduce_twins(with_v(TWIN_QUANTILES, TWIN_VALUES))
    assert_close(reduced, torch.tensor(expected, dtype=torch.float32))
    assert_close(dist.value(reduced), reduced[:, 3].double())
    assert_close(dist.mean(reduced), reduced[:, :3].double().mean(-1))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # the critic of mean 1.2, whose V is 1.2 - 2, the other's is 1 + 4
        ("min", [0.3, 0.1, 0.1, 0.1, 0.4, -20, -0.8]),
        ("mean", [0.2, 0.15, 0.25, 0.15, 0.25, 10, 2.1]),  # mean -0.2 + 0.25 + 0.3 + 0.75
    ],
)
def test_reduction_of_twin_atoms_with_v_by_hand(mode, expected, order):
    """Fujimoto et al. 2018 (TD3) for `min`, the others ours: 40 and -20 tenths beyond the means."""
    dist = atoms(twin_reduce=mode, **MEAN_HEAD)
    outputs = with_v(TWIN_PROBS.log(), [40.0, -20.0])[order]
    reduced = dist.reduce_twins(outputs)
    assert_close(reduced[:5].softmax(-1), torch.tensor(expected[:5]))
    assert float(reduced[5]) == expected[5]
    assert float(dist.value(reduced)) == pytest.approx(expected[6])


def test_value_of_the_last_output_and_mean_of_the_distribution(script):
    """Ours, decoded by van Hasselt et al. 2016: returns of mean 100 and std 2; 6 is 112.

    Three quantiles 0 1 5 have the mean 2: 104. Five equal atoms from -1 to 3 have 1: 102, and 6
    tenths beyond it are 103.2.
    """
    distribution = torch.tensor([0.0, 1, 5]) if script is lstm else torch.zeros(5)
    dist = of(script, **MEAN_HEAD)
    set_units(dist, 100, 2)
    outputs = with_v(distribution, 6.0)
    mean = 104 if script is lstm else 102
    assert float(dist.value(outputs)) == pytest.approx(112 if script is lstm else 103.2)
    assert float(dist.mean(outputs)) == pytest.approx(mean)
    own, alone = stats(dist, outputs), of(script)
    set_units(alone, 100, 2)
    assert floats(
        {"V": alone.value(distribution), "mean": alone.mean(distribution)}
    ) == pytest.approx({"V": mean, "mean": mean})
    assert own == pytest.approx(stats(alone, distribution))


def test_number_of_outputs(script):
    """Ours: K, and one more for V; a head of that size, whose outputs are all of the critic."""
    for value_from, more in (("distribution", 0), ("mean_head", 1)):
        args = small_args(script, "Counter", value_from=value_from)  # 7 quantiles, 11 atoms
        agent = make_agent(script, args)
        size = (7 if script is lstm else 11) + more
        assert agent.value_dist.num_outputs == size
        assert [head[-1].out_features for head in agent.critic_heads] == [size, size]
        parts = agent.value_dist.split(torch.arange(float(size)))
        assert [part.tolist() for part in parts] == [[*range(size - more)], [size - 1] * more]


# ------------------------------------------------------------------------------------- description
# Quantiles of U(0, 10) at K = 5: F^-1(tau) = 10 tau, linear, so exact.
UNIFORM = torch.tensor([[[9.0, 1.0, 5.0, 3.0, 7.0]]])
UNIFORM_FACTS = {
    "p10": 1.0,
    "p50": 5.0,
    "p90": 9.0,
    "cvar": 1.5,  # 10 * 0.15
    "std": 8**0.5,  # of the five: sqrt((16 + 4 + 0 + 4 + 16) / 5)
}


def test_description_of_quantiles():
    """Rockafellar & Uryasev 2000 for VaR and CVaR at 0.3, the others ours: U(0, 10)."""
    dist = quantiles(num_quantiles=5, cvar_alpha=0.3)
    assert stats(dist, UNIFORM) == pytest.approx(UNIFORM_FACTS)
    assert value_at_risk_is(dist, UNIFORM, 3.0)
    assert float(dist.mean(UNIFORM)) == pytest.approx(5)


def test_description_of_quantiles_in_the_units_of_the_task():
    """Ours, decoded by van Hasselt et al. 2016: returns of mean 100 and std 2."""
    dist = quantiles(num_quantiles=5, cvar_alpha=0.3)
    set_units(dist, 100, 2)
    assert stats(dist, UNIFORM) == pytest.approx(in_units(UNIFORM_FACTS, 100, 2))
    assert value_at_risk_is(dist, UNIFORM, 106.0)
    assert float(dist.mean(UNIFORM)) == pytest.approx(110)


# Mass 0.2, 0.5, 0.3 at 0, 1, 2 of five atoms: mean 1.1, variance 0.2 * 1.21 + 0.005 + 0.243.
MASSES = torch.tensor([[1e-9, 0.2, 0.5, 0.3, 1e-9]])
MASS_FACTS = {
    "p10": 0,  # half of bin 0
    "p50": 0.5 + 0.6,  # 0.3 of 0.5 into bin 1
    "p90": 1.5 + 2 / 3,  # 0.2 of 0.3 into bin 2
    "cvar": 0.5,  # 0.2 / 0.4
    "std": 0.49**0.5,
}


def test_description_of_atoms():
    """Rockafellar & Uryasev 2000 for CVaR at 0.4; quantiles across bins ours."""
    dist = atoms(cvar_alpha=0.4)
    assert stats(dist, MASSES.log()) == pytest.approx(MASS_FACTS, abs=1e-5)
    assert value_at_risk_is(dist, MASSES.log(), 0.5 + 0.4)  # 0.2 of 0.5 into bin 1
    assert float(dist.mean(MASSES.log())) == pytest.approx(1.1)


def test_description_of_atoms_in_the_units_of_the_task():
    """Ours, decoded by van Hasselt et al. 2016: returns of mean 10 and std 2."""
    dist = atoms(cvar_alpha=0.4)
    set_units(dist, 10, 2)
    expected = in_units(MASS_FACTS, 10, 2)
    assert stats(dist, MASSES.log()) == pytest.approx(expected, abs=1e-4)
    assert value_at_risk_is(dist, MASSES.log(), 11.8)
    assert float(dist.mean(MASSES.log())) == pytest.approx(12.2)


@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_description_of_a_rollout_is_taken_one_by_one(script, value_from):
    """Ours: means over (T, N, K) of what each (t, n) has alone, and deciles of each (t, n)."""
    dist = of(script, num_quantiles=5, value_from=value_from)
    outputs = torch.randn(3, 4, dist.num_outputs)
    together = describe(dist, outputs)
    alone = [describe(dist, outputs[t, n]) for t, n in itertools.product(range(3), range(4))]
    for key, value in together.items():
        assert_close(value, torch.stack([facts[key] for facts in alone]).mean())
    samples = targets_of(dist, torch.zeros(3, 4, 1), torch.ones(3, 4, 1))
    predicted = dist.describe(outputs, samples)["value/predicted_returns"]
    deciles = [torch.stack([facts[key] for facts in alone]) for key in ("p10", "p50", "p90")]
    assert_close(predicted, torch.stack(deciles).view(3, 3, 4))


def test_the_gap_between_mean_and_value_has_no_sign(script):
    """Ours: of two states, V is 1 std of 2 above the mean and 2 below it: (2 + 4) / 2. V of atoms
    has a tenth of the mean output."""
    dist = of(script, **MEAN_HEAD)
    set_units(dist, 10, 2)
    outputs = torch.zeros(1, 2, dist.num_outputs)
    outputs[0, :, -1] = torch.tensor([1.0, -2.0])
    samples = targets_of(dist, torch.zeros(1, 2, 1), torch.ones(1, 2, 1))
    gap = dist.describe(outputs, samples)["value/distribution_gap"]
    assert float(gap) == pytest.approx(3 if script is lstm else 0.3, rel=1e-5)


@pytest.mark.parametrize("value_from", VALUE_FROM)
@pytest.mark.parametrize(("outcome", "expected"), [(12.0, 2.4), (8.0, -5.6)])
def test_risk_advantages_are_in_the_units_of_the_task(script, outcome, expected, value_from):
    """Rockafellar & Uryasev 2000, theorem 1: a lottery in returns of mean 10 and std 2.

    Normalised: 1 with probability 0.7, else -1; at alpha 0.5 nu = 1 and CVaR = -0.1 / 0.5. An
    outcome of 1 has the advantage 1 + 0.2, one of -1 has 1 - 2 / 0.5 + 0.2; both times the std.
    """
    dist = of(script, cvar_alpha=0.5, num_quantiles=10, value_from=value_from)
    set_units(dist, 10, 2)
    outputs = torch.tensor([-1.0] * 3 + [1.0] * 7)
    if script is categorical:
        outputs = torch.tensor([0.3, 1e-12, 0.7, 1e-12, 1e-12]).log()
    if value_from == "mean_head":
        outputs = with_v(outputs, 50.0)  # which has no part in it
    samples = torch.full((1, 1, 1), outcome)
    targets = targets_of(dist, samples, torch.ones(1, 1, 1))
    advantage = dist.risk_advantages(targets, outputs[None, None])
    assert float(advantage) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("value_from", VALUE_FROM)
@pytest.mark.parametrize(("good", "expected"), [(0.7, 0.0), (0.2, -4.0)])
def test_risk_advantages_weigh_samples_by_their_probabilities(script, good, expected, value_from):
    """The lottery of above. 12 has the advantage 2.4 and 8 has -5.6, so a return that is 12 with
    probability 0.7 has 0.7 * 2.4 - 0.3 * 5.6 = 0, as the lottery itself, and one that is 12 with
    probability 0.2 has 0.48 - 4.48. Samples of quantile critics weigh alike."""
    dist = of(script, cvar_alpha=0.5, num_quantiles=10, value_from=value_from)
    set_units(dist, 10, 2)
    outputs = torch.tensor([-1.0] * 3 + [1.0] * 7)
    samples, weights = torch.tensor([12.0, 8.0]), torch.tensor([good, 1 - good])
    if script is categorical:
        outputs = torch.tensor([0.3, 1e-12, 0.7, 1e-12, 1e-12]).log()
    else:
        samples = samples.repeat_interleave(torch.tensor([round(10 * good), round(10 - 10 * good)]))
        weights = torch.full((10,), 0.1)
    if value_from == "mean_head":
        outputs = with_v(outputs, 50.0)
    targets = targets_of(dist, samples[None, None], weights[None, None])
    advantage = dist.risk_advantages(targets, outputs[None, None])
    assert float(advantage) == pytest.approx(expected, abs=1e-4)


def test_probabilities_sum_to_one_where_the_mean_is_large():
    """Returns of 1e6 +- 1: masses whose sum is off by 1e-7, as those of float32 are, would be off
    by 0.1 in the mean. Atoms that get their own distribution as targets have advantages of 0."""
    dist = atoms(cvar_alpha=0.5)
    set_units(dist, 1e6, 1)
    outputs = torch.randn(50, 4, 5)
    ends, zeros = torch.zeros(50, 4, dtype=torch.bool), torch.zeros(50, 4, dtype=torch.float64)
    rollout = SimpleNamespace(rewards=zeros, terminated=ends, truncated=~ends)
    dist.args.gamma, dist.args.num_envs = 1.0, 4
    targets = dist.sample_targets(rollout, outputs, gae_lambda=0.0)
    means = (targets.probs * (targets.returns - 1e6)).sum(-1)
    expected = outputs.double().softmax(-1) @ torch.linspace(-1, 3, 5).double()
    assert_close(means, dist.moments.std * expected, rtol=0, atol=1e-8)
    assert_close(targets.probs.sum(-1), torch.ones_like(means), rtol=0, atol=1e-12)
    assert dist.risk_advantages(targets, outputs).abs().max() < 1e-6


def test_a_level_between_two_masses_is_at_the_lower_one():
    """F^-1(0.5) is the least x with F(x) >= 0.5: the end of the first bin, and not that of the
    empty one behind it."""
    dist = atoms(num_atoms=3, v_min=-1.0, v_max=1.0)
    outputs = torch.tensor([[0.5, 1e-30, 0.5]]).log()
    assert float(dist.quantile(outputs, 0.5)) == pytest.approx(-0.5, abs=1e-5)


def test_risk_advantages_of_a_rollout_are_taken_one_by_one(script):
    """Rockafellar & Uryasev 2000, theorem 1: (T, N), each (t, n) as if it were alone."""
    dist = of(script, cvar_alpha=0.3, num_quantiles=5)
    outputs, samples = torch.randn(3, 4, 5), torch.randn(3, 4, 2)
    weights = torch.full((3, 4, 2), 0.5)  # samples of quantile critics weigh alike
    if script is categorical:
        weights = torch.rand(3, 4, 2).softmax(-1)
    together = dist.risk_advantages(targets_of(dist, samples, weights), outputs)
    assert together.shape == (3, 4)
    for t, n in itertools.product(range(3), range(4)):
        x, w, z = (x[t, n][None, None] for x in (samples, weights, outputs))
        assert_close(together[t, n], dist.risk_advantages(targets_of(dist, x, w), z)[0, 0])


# ----------------------------------------------------------------------------------------- targets
@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_sampled_returns_bootstrap_from_decoded_distributions(script, value_from):
    """Nam et al. 2021 (GMAC), SR(lambda) at lambda 0: r + gamma z', in the task's units."""
    dist = of(script, num_quantiles=5, value_from=value_from, gamma=0.9, num_envs=2)
    set_units(dist, 10, 2)
    outputs, rewards = torch.randn(3, 2, 5).double(), torch.randn(3, 2).double()
    terminated = torch.tensor([[0, 0], [0, 1], [0, 0]]).bool()
    truncated = torch.tensor([[1, 0], [0, 0], [0, 0]]).bool()
    seen = outputs if value_from == "distribution" else with_v(outputs, [[50.0] * 2] * 3)
    rollout = SimpleNamespace(rewards=rewards, terminated=terminated, truncated=truncated)
    targets = dist.sample_targets(rollout, seen, gae_lambda=0.0)
    samples = targets if script is lstm else targets.returns
    z = outputs if script is lstm else torch.linspace(-1, 3, 5).double().expand(3, 2, 5)
    expected = rewards[..., None] + 0.9 * ~terminated[..., None] * (2 * z + 10)
    assert_close(samples, expected)
    if script is categorical:
        assert_close(targets.probs, outputs.softmax(-1))


def test_crossing_fraction_counts_neighbours_in_the_wrong_order():
    """Ours: 0 1 5 none; 4 2 3 one; 3 2 4 one; 1 6 -1 one: 3 of 8. A low V crosses nothing."""
    heads, returns = nn.ModuleList(), torch.randn(2, 1)
    _, metrics = move_to(quantiles(), heads, TWIN_QUANTILES, returns)
    assert float(metrics["value/crossing_fraction"]) == 3 / 8
    low = with_v(TWIN_QUANTILES, [[-9.0, -9.0]] * 2)
    _, metrics = move_to(quantiles(**MEAN_HEAD), heads, low, returns)
    assert float(metrics["value/crossing_fraction"]) == 3 / 8


@pytest.mark.parametrize("K", [1, 3])
def test_equal_neighbours_do_not_cross(K):
    """Ours: neither do equal ones, nor a single quantile, which has no neighbour."""
    outputs, zero = torch.ones(2, 4, K), torch.zeros(4, 1)
    _, metrics = move_to(quantiles(num_quantiles=K), nn.ModuleList(), outputs, zero)
    assert float(metrics["value/crossing_fraction"]) == 0


def test_quantiles_train_on_samples_of_normalised_returns():
    """Van Hasselt et al. 2016: (x - mean) / std for mean 100 and std 2, otherwise as they are."""
    dist, samples = quantiles(), torch.tensor([[100.0, 104.0], [97.0, 101.0]])
    set_units(dist, 100, 2)
    encoded = encode(dist, samples, torch.full((2, 2), 0.5))
    assert_close(encoded, torch.tensor([[0.0, 2.0], [-1.5, 0.5]]))


LOGITS = torch.zeros(2, 6, 5)


def share_outside(samples: Tensor, weights: Tensor, mean: float = 0.0) -> tuple[float, str]:
    """The logged share of target mass beyond the support, and the warning."""
    dist = atoms(norm_returns=False)
    set_units(dist, mean, 1)
    targets = categorical.WeightedReturns(samples, weights)
    _, metrics = dist.move_statistics(nn.ModuleList(), LOGITS, targets)
    return float(metrics["value/outside_support"]), metrics.get("warning/outside_support", "")


def test_share_outside_of_the_support():
    """Ours: -1.5 and 3.5 and 9 of six targets; the edges are inside."""
    samples = torch.tensor([-1.5, -1.0, 3.0, 3.5, 9.0, 0.0])[:, None]
    assert share_outside(samples, torch.ones(6, 1))[0] == 0.5


@pytest.mark.parametrize("shape", [(1,), (4, 2)])
def test_share_outside_of_the_support_is_weighted(shape):
    """Ours: 0.25 at -1.5 and 0.05 at 9; for many steps and environments alike."""
    samples = torch.tensor([-1.5, 2.0, 9.0]).expand(*shape, 3)
    weights = torch.tensor([0.25, 0.7, 0.05]).expand(*shape, 3)
    assert share_outside(samples, weights)[0] == pytest.approx(0.3)


def test_share_outside_of_the_support_is_that_of_normalised_returns():
    """Van Hasselt et al. 2016: less a mean of 9, -10.5, -7, 0; only the last one is inside."""
    samples = torch.tensor([[-1.5, 2.0, 9.0]])
    weights = torch.tensor([[0.25, 0.7, 0.05]])
    assert share_outside(samples, weights, mean=9)[0] == pytest.approx(0.95)


def warning(outside: int) -> str:
    """The warning at so many of 200 targets beyond the support."""
    samples = torch.zeros(200, 1).double()
    samples[:outside] = 99
    share, text = share_outside(samples, torch.ones_like(samples))
    assert share == outside / 200
    return text


def test_more_than_one_percent_outside_of_the_support_is_said_once():
    """Ours: 2 of 200 are not more than 1 %; one line, with what to do, and never again."""
    assert warning(0) == warning(2) == ""
    for part in ("value/outside_support", "1.5%", "--v-min", "--v-max"):
        assert part in warning(3)
    assert "\n" not in warning(3)
    assert "100.0%" in warning(200)
    said = []
    run = SimpleNamespace(warned=set(), say=said.append)
    for text in (warning(3), warning(200)):
        categorical.Run.warn(run, "warning/outside_support", text)
    assert said == [f"warning: {warning(3)}"]


def test_two_hot_targets():
    """Bellemare et al. 2017, algorithm 1: 0.3 between atoms 0 and 1, 2.2 between 2 and 3."""
    dist, samples = atoms(target_encoding="two_hot"), torch.tensor([[0.3], [2.2]])
    encoded = encode(dist, samples, torch.ones(2, 1))
    assert_close(encoded, torch.tensor([[0, 0.7, 0.3, 0, 0], [0, 0, 0, 0.8, 0.2]]))


def test_hl_gauss_targets():
    """Imani & White 2018; Farebrother et al. 2024: sigma in bin widths, 0.6 of bins of 2."""
    dist = atoms(target_encoding="hl_gauss", hl_gauss_sigma=0.6, v_max=7.0)
    samples = torch.tensor([[0.3], [2.2]])
    encoded = encode(dist, samples, torch.ones(2, 1))
    support = torch.tensor([-1.0, 1, 3, 5, 7])
    expected = categorical.hl_gauss(samples[:, 0], support, 1.2)
    assert_close(encoded, expected)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (10.0, 2.0)])
@pytest.mark.parametrize("encoding", ["two_hot", "hl_gauss"])
def test_encodings_of_samples_are_mixed_by_their_weights(encoding, mean, std):
    """Van Hasselt et al. 2016: targets come in the task's units; the mixture is ours."""
    dist = atoms(target_encoding=encoding)
    pairs = torch.tensor([[0.3, 1.6], [2.2, -0.4]])
    weights = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    parts = []
    for sample, weight in zip(pairs.T, weights.T):  # each alone, in normalised units
        one = encode(dist, sample[:, None], torch.ones(2, 1))
        parts.append(weight[:, None] * one)
    set_units(dist, mean, std)
    encoded = encode(dist, std * pairs + mean, weights)
    assert_close(encoded, parts[0] + parts[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("encoding", ["two_hot", "hl_gauss"])
def test_a_far_target_still_pulls_towards_the_edge(encoding):
    """Bellemare et al. 2017, algorithm 1; Farebrother et al. 2024: it raises the last logit."""
    dist = atoms(target_encoding=encoding)
    logits = torch.zeros(1, 1, 5, requires_grad=True)
    far = (torch.tensor([[1000.0]]), torch.ones(1, 1))
    targets = encode(dist, *far)
    loss, _ = loss_of(dist, logits, targets, torch.zeros(1, 1, 1))
    loss.sum().backward()
    assert int(logits.grad.argmin()) == 4
    assert logits.grad[0, 0, 4] < -0.3


# ------------------------------------------------------------------------ quantiles: loss, clipping
def slow_loss(q: Tensor, target: float, kappa: float) -> float:
    """Quantile Huber loss of one sample, written out."""
    total = 0.0
    for i, value in enumerate(q.tolist()):
        tau = (i + 0.5) / len(q)
        u = target - value
        size = abs(u)
        if abs(u) <= kappa:
            size = u * u / (2 * kappa) if kappa > 0 else 0.0
        elif kappa > 0:
            size -= kappa / 2
        total += abs(tau - (u < 0)) * size
    return total / len(q)


@pytest.mark.parametrize("kappa", [0.0, 0.5])
def test_loss_of_each_critic_on_the_same_targets(kappa):
    """Dabney et al. 2018b (IQN), eq. 3: (C, T, N) losses, unclipped by default."""
    dist = quantiles(kappa=kappa)
    outputs, targets = torch.randn(2, 4, 5, 3), torch.randn(4, 5, 1)
    loss, changed = loss_of(dist, outputs, targets, torch.randn(2, 4, 5, 3))
    assert loss.shape == (2, 4, 5)
    assert changed.sum() == 0
    for c, t, n in itertools.product(range(2), range(4), range(5)):
        expected = slow_loss(outputs[c, t, n], float(targets[t, n]), kappa)
        assert float(loss[c, t, n]) == pytest.approx(expected, rel=1e-5)


def slow_clip(q: Tensor, old: Tensor, d: float, mode: str) -> Tensor:
    """One prediction clipped around its old self, written out."""
    if mode == "per_quantile":
        moves = [min(max(float(x), -d), d) for x in q - old]
        return old + torch.tensor(moves)
    m, m_old = q.mean(), old.mean()
    centre = m_old + min(max(m - m_old, -d), d)
    if mode == "mean_only":
        return q - m + centre
    spread, old_spread = q.std(correction=0), old.std(correction=0)
    return centre + (q - m) * min(1.0, float(2 * old_spread / spread))


@pytest.mark.parametrize("mode", CLIPPINGS)
def test_clipping_of_quantiles_takes_the_larger_loss_per_sample_and_critic(mode):
    """Reference code of Schulman et al. 2017, modes ours: each around its own old output."""
    dist = quantiles(kappa=0.0, vf_clip=mode, vf_clip_coef=0.2)
    outputs, targets = torch.randn(2, 3, 4, 3), torch.randn(3, 4, 1)
    old = outputs + 0.4 * torch.randn_like(outputs)
    loss, changed = loss_of(dist, outputs, targets, old)
    larger = 0
    for c, t, n in itertools.product(range(2), range(3), range(4)):
        q = outputs[c, t, n]
        target = float(targets[t, n])
        clipped = slow_clip(q, old[c, t, n], 0.2, mode)
        plain, other = slow_loss(q, target, 0.0), slow_loss(clipped, target, 0.0)
        assert float(loss[c, t, n]) == pytest.approx(max(plain, other), rel=1e-4)
        assert changed[c, t, n] == ((clipped - q).abs().max() > 1e-5)
        larger += other > plain
    assert 0 < larger < 24


@pytest.mark.parametrize(("move", "expected"), [(0.1, 0), (0.3, 1)])
def test_clipped_samples_are_counted_beyond_rounding(move, expected):
    """Ours: predictions inside the range are not changed, even where a + (b - a) rounds."""
    dist = quantiles(vf_clip="mean_only", vf_clip_coef=0.2, num_quantiles=7)
    old = 7 * torch.randn(2, 50, 1, 7)
    _, changed = loss_of(dist, old + move, torch.zeros(50, 1, 1), old)
    assert (changed == expected).all()


# ----------------------------------------------------------------------------- loss of a V, clipped
def distribution_and_v(script: ModuleType, **flags: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """A distribution with a V, the same one without, and a batch of both; V's are 0 1.5 | 2 -1."""
    with_head, without = (of(script, **flags, value_from=x) for x in reversed(VALUE_FROM))
    K = without.num_outputs
    outputs, old = torch.randn(2, 2, 1, K), torch.randn(2, 2, 1, K if script is lstm else 1)
    targets = encode(without, torch.randn(2, 1, 1), torch.ones(2, 1, 1))
    values = torch.tensor([[[0.0], [1.5]], [[2.0], [-1.0]]])
    if script is categorical:  # the last output is what V exceeds the mean by, in tenths
        values = 10 * (values - outputs.softmax(-1) @ without.support)
    return with_head, without, {"out": outputs, "old": old, "targets": targets, "v": values}


def test_loss_of_v_is_added_to_that_of_the_distribution(script):
    """Ours: 0.5 (V - R)^2; V's 0 and 1.5, 2 and -1 on R = 1 and -1: 0.5 3.125 | 0.5 0."""
    own, alone, batch = distribution_and_v(script)
    plain, _ = loss_of(alone, batch["out"], batch["targets"], batch["old"])
    returns = torch.tensor([[1.0], [-1.0]])
    out = torch.cat((batch["out"], batch["v"][..., None]), -1)
    loss, changed = own.loss(out, batch["targets"], returns, torch.full_like(out, torch.nan))
    assert changed.sum() == 0
    expected = torch.tensor([[[0.5], [3.125]], [[0.5], [0.0]]])
    assert_close(loss - plain, expected, rtol=0, atol=1e-5)


def test_v_is_clipped_around_its_own_old_value(script):
    """Reference code of Schulman et al. 2017: max of the two squared errors, V against R, d 0.2.

    V 0 from 0.5: clipped 0.3, errors at R = 1 0.5 and 0.245: 0.5. V 1.5 from 1: clipped 1.2, at
    R = -1 3.125 and 2.42: 3.125. V 2 from 1: clipped 1.2, at R = 1 0.5 and 0.02: 0.5. V -1 from 0:
    clipped -0.2, at R = -1 0 and 0.32: 0.32. The distribution is clipped as without a V.
    """
    own, alone, batch = distribution_and_v(script, vf_clip="mean_only", vf_clip_coef=0.2)
    plain, _ = loss_of(alone, batch["out"], batch["targets"], batch["old"])
    returns = torch.tensor([[1.0], [-1.0]])
    old_v = torch.tensor([[[0.5], [1.0]], [[1.0], [0.0]]])
    out = torch.cat((batch["out"], batch["v"][..., None]), -1)
    old = torch.cat((batch["old"], old_v[..., None]), -1)
    loss, changed = own.loss(out, batch["targets"], returns, old)
    expected = torch.tensor([[[0.5], [3.125]], [[0.5], [0.32]]])
    assert_close(loss - plain, expected, rtol=0, atol=1e-5)
    assert (changed == 1).all()


@pytest.mark.parametrize(("move", "expected"), [(0.1, 0), (0.3, 1)])
def test_a_moved_v_alone_counts_as_clipped(script, move, expected):
    """Ours: with the distribution where it was, by V's move against d = 0.2."""
    own = of(script, vf_clip="mean_only", vf_clip_coef=0.2, norm_returns=False, **MEAN_HEAD)
    heads = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, own.num_outputs)) for _ in range(2))
    outputs = outputs_of(heads, torch.randn(3, 4, FEATURES))
    old, _ = move_to(own, heads, outputs, torch.tensor([[-1.0], [1.0]]))
    outputs = outputs.clone()
    samples = torch.zeros(3, 4, 1)
    targets, returns = encode(own, samples, samples + 1), torch.zeros(3, 4)
    _, changed = own.loss(outputs, targets, returns, old)
    assert changed.sum() == 0
    outputs[..., -1] += move if script is lstm else 10 * move
    _, changed = own.loss(outputs, targets, returns, old)
    assert (changed == expected).all()


def test_gradient_of_the_squared_error(script):
    """Ours: of the last layer only V's row gets the squared error, below it the hidden layer does.

    By the difference of two returns that change nothing else: dL/dV = V - R; a tenth with atoms.
    """
    dist = of(script, num_quantiles=5, **MEAN_HEAD)
    hidden, last = nn.Linear(FEATURES, 8), nn.Linear(8, 6)
    features, samples = torch.randn(7, FEATURES), torch.randn(7, 1)
    targets = encode(dist, samples, torch.ones(7, 1))
    parameters = [*hidden.parameters(), *last.parameters()]

    def gradients(returns: Tensor) -> list[Tensor]:
        outputs = last(hidden(features).tanh())[None]
        loss, _ = dist.loss(outputs, targets, returns, torch.zeros_like(outputs))
        return torch.autograd.grad(loss.sum(), parameters)

    returns = torch.randn(7)
    pairs = zip(gradients(returns), gradients(returns + 1))
    below, bias_below, weight, bias = (one - two for one, two in pairs)
    inside = hidden(features).tanh().detach()
    gain = 1 if script is lstm else 0.1
    assert_close(weight[5], gain * inside.sum(0), rtol=1e-4, atol=1e-5)  # 1 a sample, of V
    assert_close(bias[5], torch.tensor(gain * 7.0))
    assert weight[:5].abs().max() < 1e-6
    assert bias[:5].abs().max() < 1e-6
    error = gain * last.weight[5].detach() * (1 - inside.square())  # (7, 8), through tanh
    assert_close(bias_below, error.sum(0), rtol=1e-4, atol=1e-5)
    assert_close(below, error.T @ features, rtol=1e-4, atol=1e-5)


def test_without_a_v_of_its_own_returns_are_not_looked_at(script):
    """Ours: any returns, the same loss and gradient, bit for bit; K old outputs, or one mean."""
    dist = of(script, vf_clip="mean_only")
    outputs = torch.randn(2, 4, dist.num_outputs, requires_grad=True)
    targets = encode(dist, torch.randn(4, 1), torch.ones(4, 1))
    old = torch.randn(2, 4, 3 if script is lstm else 1)
    facts = []
    for returns in (torch.zeros(4), torch.full((4,), 1e6)):
        loss, _ = dist.loss(outputs, targets, returns, old)
        facts.append((loss, *torch.autograd.grad(loss.sum(), outputs)))
    for one, two in zip(*facts):
        assert torch.equal(one, two)


# ---------------------------------------------------------------------------- atoms: loss, clipping
def atom_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of two critics (2, 3, 4, 5), encoded targets (3, 4, 5), old means (2, 3, 4, 1)."""
    outputs, samples = torch.randn(2, 3, 4, 5), torch.randn(3, 4, 1)
    targets = encode(atoms(), samples, torch.ones(3, 4, 1))
    return outputs, targets, 1 + 0.5 * torch.randn(2, 3, 4, 1)


def slow_shift(mean: float, old: float, d: float) -> float:
    """What brings the mean to within d of the old one."""
    return min(max(mean, old - d), old + d) - mean


def slow_moved(target: Tensor, move: float) -> Tensor:
    """Masses at -1 0 1 2 3 moved and split between neighbours, those beyond the ends kept there."""
    moved = torch.zeros(5, dtype=torch.float64)
    for k, mass in enumerate(target.tolist()):
        place = min(max(k + move, 0.0), 4.0)
        left = min(int(place), 3)
        moved[left] += mass * (left + 1 - place)
        moved[left + 1] += mass * (place - left)
    return moved


def slow_cross_entropy(target: Tensor, logits: Tensor) -> float:
    """-sum target log softmax, in float64."""
    return -float((target.double() * logits.double().log_softmax(-1)).sum())


def test_loss_of_atoms_is_the_cross_entropy_of_each_critic():
    """Bellemare et al. 2017, algorithm 1: (C, T, N) losses, unclipped by default."""
    outputs, targets, old = atom_batch()
    loss, changed = loss_of(atoms(), outputs, targets, old)
    assert changed.sum() == 0
    for c, t, n in itertools.product(range(2), range(3), range(4)):
        terms = targets[t, n] * outputs[c, t, n].log_softmax(-1)
        expected = -float(terms.sum())
        assert float(loss[c, t, n]) == pytest.approx(expected, rel=1e-5)


def test_clipping_of_atoms_takes_the_larger_loss_per_sample_and_critic():
    """Reference code of Schulman et al. 2017, for atoms ours: each around its own old mean.

    A prediction moved by a shift meets the target where the target moved back meets it.
    """
    outputs, targets, old = atom_batch()
    dist = atoms(vf_clip="mean_only", vf_clip_coef=0.2)
    loss, changed = loss_of(dist, outputs, targets, old)
    larger = 0
    for c, t, n in itertools.product(range(2), range(3), range(4)):
        logits = outputs[c, t, n]
        mean = float(logits.softmax(-1) @ dist.support)
        shift = slow_shift(mean, float(old[c, t, n]), 0.2)
        plain = slow_cross_entropy(targets[t, n], logits)
        other = slow_cross_entropy(slow_moved(targets[t, n], -shift), logits)
        assert float(loss[c, t, n]) == pytest.approx(max(plain, other), rel=1e-4)
        assert changed[c, t, n] == (abs(shift) > 1e-5)
        larger += other > plain
    assert 0 < larger < 24


@pytest.mark.parametrize("kind", ["quantiles", "atoms"])
def test_the_twins_do_not_share_an_old_value(kind):
    """Reference code of Schulman et al. 2017: critic 2's old output changes its loss alone."""
    outputs, targets, old = atom_batch()
    dist = atoms(vf_clip="mean_only")
    if kind == "quantiles":
        dist = quantiles(vf_clip="per_quantile", num_quantiles=5)
        targets, old = torch.randn(3, 4, 1), torch.randn(2, 3, 4, 5)
    base, _ = loss_of(dist, outputs, targets, old)
    old[1] += 1
    moved, _ = loss_of(dist, outputs, targets, old)
    assert torch.equal(base[0], moved[0])
    assert not torch.equal(base[1], moved[1])


# -------------------------------------------------------------------------------- moving statistics
FEATURES = 4


def twin_heads(num_outputs: int = 5) -> tuple[nn.ModuleList, Tensor]:
    """Two heads with so many outputs, and features (3, 4, F) of some states."""
    heads = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, num_outputs)) for _ in range(2))
    return heads, torch.randn(3, 4, FEATURES)


def outputs_of(heads: nn.ModuleList, features: Tensor) -> Tensor:
    """(C, 3, 4, K), without a graph."""
    return torch.stack([head(features) for head in heads]).detach()


@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_quantiles_are_decoded_as_before_when_statistics_move(value_from):
    """Van Hasselt et al. 2016, eq. 5: both critics, outputs and old values in the new units."""
    dist = quantiles(num_quantiles=5, value_from=value_from)
    heads, features = twin_heads(dist.num_outputs)
    set_units(dist, 10, 4)
    outputs = outputs_of(heads, features)
    before = dist.moments.denormalize(outputs)
    old, _ = move_to(dist, heads, outputs, 300 * torch.randn(7, 4) - 50)
    assert float(dist.moments.std) > 100
    for z in (old, outputs_of(heads, features)):
        assert_close(dist.moments.denormalize(z), before, rtol=0, atol=3e-3)  # 1e-5 of the std


@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_outputs_of_atoms_stay_when_statistics_move(value_from):
    """Van Hasselt et al. 2016, as far as fixed atoms allow: what V exceeds their mean by stays.

    Old means, for value clipping, are what was predicted, in the new units: z' = (std z + mean -
    mean') / std'. They are not what these atoms say now, which is something else.
    """
    dist = atoms(value_from=value_from)
    heads, features = twin_heads(dist.num_outputs)
    set_units(dist, 10, 4)
    outputs = outputs_of(heads, features)
    before = 4 * outputs[..., 5:]
    mean = 10 + 4 * (outputs[..., :5].softmax(-1) @ torch.linspace(-1, 3, 5)).double()
    old, _ = move_to(dist, heads, outputs, 300 * torch.randn(7, 4) - 50)
    carried = outputs_of(heads, features)
    assert torch.equal(carried[..., :5], outputs[..., :5])
    assert_close(dist.moments.std.float() * carried[..., 5:], before, rtol=0, atol=3e-3)
    moments = dist.moments
    expected = (mean - moments.mean) / moments.std
    assert_close(old[..., 0], expected.to(old), rtol=1e-5, atol=1e-6)
    assert_close(old[..., 1:], old[..., :1] + 0.1 * carried[..., 5:].to(old), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_a_jump_of_atoms_may_be_repaired_in_one_update(value_from):
    """From units (0, 10) to (5, 20) the normalised mean 1, which meant 10, means 25. The old mean
    is (10 - 5) / 20 = 0.25, and a return of 10 pulls the prediction all the way back to it, since
    the plain loss is the larger one. Around 1, with a range of 0.2, it would stop at 0.8, at 21."""
    dist = atoms(value_from=value_from, vf_clip="mean_only", vf_clip_coef=0.2)
    set_units(dist, 0, 10)
    dist.moments.merge = lambda *found, weight: set_units(dist, 5, 20)
    outputs = torch.full((1, 1, 1, dist.num_outputs), -30.0)
    outputs[..., 2] = 30  # the atoms are -1, 0, 1, 2 and 3
    outputs[..., 5:] = 0
    old, _ = move_to(dist, nn.ModuleList(), outputs, torch.full((1, 1), 10.0).double())
    assert_close(old, torch.full_like(old, 0.25))
    wanted = torch.tensor([[[0.0, 0.75, 0.25, 0, 0]]])  # two-hot of (10 - 5) / 20
    for mean in (0.9, 0.7, 0.5, 0.3):
        logits = torch.tensor([1e-30, 1 - mean, mean, 1e-30, 1e-30]).log().requires_grad_()
        excess = torch.zeros(dist.num_outputs - 5)
        said = torch.cat((logits, excess))[None, None, None]
        loss, _ = dist.loss(said, wanted, torch.full((1, 1), 0.25), old.float())
        [gradient] = torch.autograd.grad(loss.sum(), logits)
        assert gradient[2] > 0 > gradient[1], mean  # down from 1, towards 0


@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_nothing_is_clipped_ahead_of_the_first_step(value_from):
    """Reference code of Schulman et al. 2017: V_old is V itself there, however units moved. Of
    quantiles this holds, since they are rescaled."""
    import distributional_ppo_lstm as script

    flags = {"num_quantiles": 5, "vf_clip": "mean_only", "vf_clip_coef": 0.01}
    dist = of(script, value_from=value_from, **flags)
    heads, features = twin_heads(dist.num_outputs)
    set_units(dist, 10, 4)
    outputs = outputs_of(heads, features)
    old, _ = move_to(dist, heads, outputs, 300 * torch.randn(7, 4) - 50)
    samples = torch.randn(3, 4, 1)
    targets, returns = encode(dist, samples, torch.ones(3, 4, 1)), torch.randn(3, 4)
    facts = (outputs_of(heads, features), targets, returns, old)
    loss, changed = dist.loss(*facts)
    assert changed.sum() == 0
    unclipped, _ = of(script, value_from=value_from, **flags | {"vf_clip": "none"}).loss(*facts)
    assert_close(loss, unclipped)


@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_statistics_stay_without_normalised_returns(script, value_from):
    """Ours: with --no-norm-returns nothing moves, neither statistics nor outputs."""
    dist = of(script, num_quantiles=5, norm_returns=False, value_from=value_from)
    heads, features = twin_heads(dist.num_outputs)
    outputs = outputs_of(heads, features)
    move_to(dist, heads, outputs, 300 * torch.randn(7, 4) - 50)
    assert float(dist.moments.count) == 0
    assert_close(outputs_of(heads, features), outputs)


@pytest.mark.parametrize(("memory", "mean"), [(1, 5.625), (3, 3.5), (4, 3.5), (100, 3.5)])
def test_statistics_tell_of_so_many_rollouts(script, memory, mean):
    """Chan et al. 1983 with a capped count: after returns of 0, 1, 4 and 9, two numbers a rollout,
    ((0 + 1) / 2 + 4) / 2 = 2.25 and (2.25 + 9) / 2 where one rollout's weight is held; of three
    and more all four have weighed alike, 14 / 4."""
    dist = of(script, norm_returns_memory=memory)
    heads, features = twin_heads(dist.num_outputs)
    for value in (0.0, 1.0, 4.0, 9.0):
        move_to(dist, heads, outputs_of(heads, features), torch.full((2, 1), value))
    assert float(dist.moments.mean) == pytest.approx(mean)


@pytest.mark.parametrize("mode", CLIPPINGS)
def test_clipping_changes_the_same_samples_at_every_scale_of_returns(mode):
    """Ours, d in normalised returns: one share at std 1, 10 and 100, the statistics refit."""
    (heads, features), returns = twin_heads(), torch.randn(7, 4)
    moves = 0.3 * torch.randn(2, 3, 4, 1)
    facts = []
    for std in (1, 10, 100):
        dist = quantiles(vf_clip=mode, vf_clip_coef=0.2, num_quantiles=5)
        set_units(dist, 5 * std, std)
        own = copy.deepcopy(heads)
        outputs = outputs_of(own, features)
        old, _ = move_to(dist, own, outputs, std * (2 * returns + 4))
        moved = outputs_of(own, features) + moves
        facts.append(loss_of(dist, moved, torch.zeros(3, 4, 1), old))
    for loss, changed in facts[1:]:
        assert_close(loss, facts[0][0], rtol=1e-4, atol=1e-4)
        assert torch.equal(changed, facts[0][1])
    assert 0.1 < facts[0][1].mean() < 0.9


# ------------------------------------------------------------------------------------- calibration
@pytest.mark.parametrize("value_from", VALUE_FROM)
def test_default_flags_learn_quantiles_and_not_expectiles(value_from):
    """Dabney et al. 2018a, eq. 8 to 10, by the default flags, fit to 1000 quantiles of N(0, 1).

    Every quantile covers its level within 2 points, CVaR_0.05 within 5 %; V is the mean.
    """
    flags = lstm.Args(value_from=value_from)
    dist = lstm.ValueDistribution(flags)
    levels = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sample = torch.special.ndtri(levels)[:, None].float()
    q = torch.zeros(dist.num_outputs, requires_grad=True)
    optimizer = torch.optim.Adam([q], 0.05)
    for i in range(400):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - i / 400)
        outputs = q.expand(1, 1000, -1)
        loss, _ = dist.loss(outputs, sample, sample[:, 0], outputs.detach())
        optimizer.zero_grad()
        (loss.mean() * flags.num_quantiles).backward()
        optimizer.step()
    coverage = (sample <= q.detach()[: flags.num_quantiles]).float().mean(0)
    assert_close(coverage, dist.support, rtol=0, atol=0.02)
    cvar = describe(dist, q.detach())["cvar"]
    assert float(cvar) == pytest.approx(-2.0627, rel=0.05)  # phi(1.6449) / 0.05
    assert float(dist.value(q.detach())) == pytest.approx(0, abs=0.02)


def test_equal_values_are_the_first_critic_s():
    """Fujimoto et al. 2018 (TD3): a tie of the twins goes to critic 1 (ours). Both have the mean 0;
    the second has its mass at the ends."""
    dist = of(categorical, num_atoms=3, v_min=-5, v_max=5, value_from="distribution")
    outputs = torch.tensor([[[0.0, 5.0, 0.0]], [[5.0, 0.0, 5.0]]])
    assert dist.value(outputs).tolist() == [[0], [0]]
    assert torch.equal(dist.reduce_twins(outputs), outputs[0])


def test_the_mean_of_twins_keeps_small_probabilities():
    """Half of a mass of e^-40, 4e-18, is still there, and far below a millionth."""
    dist = of(categorical, num_atoms=3, value_from="distribution", twin_reduce="mean")
    outputs = torch.tensor([[[0.0, 0.0, -40.0]], [[0.0, 0.0, -40.0]]])
    probs = dist.probs(dist.reduce_twins(outputs))[0]
    assert_close(probs[:2], torch.full((2,), 0.5))
    assert 0 < float(probs[2]) < 1e-16


def test_v_alone_learns_half_its_squared_error(script):
    """Of V = 1 and a return of 4 that is 4.5, and its gradient -3; the distribution has none."""
    dist = of(script, value_from="mean_head", dist_coef=0, **VALUE_ALONE.get(script, {}))
    outputs = with_v(torch.tensor([[7.0, 8.0, 9.0, 6.0, 5.0][: len(dist.support)]]), [1.0])
    outputs = outputs[None].requires_grad_()  # (1, 1, K + 1)
    targets = torch.zeros(1, len(dist.support))
    losses, clipped = dist.loss(outputs, targets, torch.tensor([4.0]), outputs)
    losses.sum().backward()
    assert losses.tolist() == [[4.5]]
    assert clipped.tolist() == [[0.0]]
    assert outputs.grad.flatten().tolist() == [*len(dist.support) * [0.0], -3.0]


@pytest.mark.parametrize("vf_clip", ["none", "mean_only"])
def test_the_weight_of_the_distribution(script, vf_clip):
    """The loss is linear in it, with clipping as well: a weight of 2 adds as much as one of 1."""
    losses = []
    for weight in (0, 1, 2):
        flags = VALUE_ALONE.get(script, {}) | {"vf_clip": vf_clip}
        dist = of(script, value_from="mean_head", dist_coef=weight, **flags)
        K = len(dist.support)
        outputs = with_v(torch.arange(K * 1.0)[None], [1.0])[None]
        old = torch.full((1, 1, 2 if script is categorical else K + 1), 0.5)
        targets = torch.full((1, K), 1 / K)
        losses.append(float(dist.loss(outputs, targets, torch.tensor([4.0]), old)[0]))
    assert losses[1] - losses[0] == pytest.approx(losses[2] - losses[1])
    assert losses[1] - losses[0] > 0.01


@pytest.mark.parametrize(
    ("flags", "reader"),
    [
        ({"cvar_weight": 0.5, "cvar_alpha": 0.5}, "--cvar-weight"),
        ({"mean_output": "correction"}, "--mean-output correction"),
    ],
)
def test_a_distribution_that_is_read_has_to_learn(script, flags, reader):
    """V corrects the atoms' mean by default, so the feed-forward script needs another flag."""
    flags = {"value_from": "mean_head"} | VALUE_ALONE.get(script, {}) | flags
    if script is lstm and "mean_output" in flags:
        pytest.skip("its V is always an output of its own")
    with pytest.raises(script.UsageError, match=f"--dist-coef 0.0: must be above 0 with {reader},"):
        of(script, dist_coef=0, **flags)


def test_a_weight_beside_nothing_is_refused(script):
    """Where V is the distribution's mean, there is no other loss to weigh it against."""
    for weight in (0.0, 0.5, 2.0):
        with pytest.raises(script.UsageError, match="must be 1 with --value-from distribution"):
            of(script, value_from="distribution", dist_coef=weight)
    of(script, value_from="distribution", dist_coef=1.0)


def test_a_tail_of_all_returns_is_not_read(script):
    """With alpha 1 the CVaR advantage is left out, so critics may learn V alone."""
    flags = {"value_from": "mean_head"} | VALUE_ALONE.get(script, {})
    of(script, dist_coef=0, cvar_weight=0.5, cvar_alpha=1.0, **flags)


VALUE_ALONE = {categorical: {"mean_output": "value"}}


@pytest.mark.parametrize("beyond", [5e-6, -1e-5, 1e-4])
def test_clipping_by_a_little_is_counted(script, beyond):
    """V is a little more or less than 0.2 above the old one, and 0.2 is the range."""
    number = {"num_quantiles": 3} if script is lstm else {"num_atoms": 3, "v_min": -5, "v_max": 5}
    flags = {"vf_clip": "mean_only", "vf_clip_coef": 0.2, "num_critics": 1}
    dist = of(script, value_from="mean_head", **flags, **number)
    outputs = torch.zeros(1, 1, dist.num_outputs)
    outputs[..., -1] = (0.2 + beyond) / (0.1 if script is categorical else 1)
    old = torch.zeros(1, 1, 2 if script is categorical else dist.num_outputs)
    targets = dist.encode_targets(dist.point_targets(torch.zeros(1, 1, dtype=torch.float64)))
    _, clipped = dist.loss(outputs, targets.view(1, -1), torch.zeros(1), old)
    assert float(clipped) == (beyond > 0)


def test_a_tail_of_one_quantile_is_enough():
    """20 quantiles have one in the worst twentieth. A policy that is not trained needs no tail."""
    flags = {"num_quantiles": 20, "cvar_weight": 1.0}
    lstm.ValueDistribution(lstm.Args(cvar_alpha=0.05, **flags))
    with pytest.raises(lstm.UsageError, match=r"cvar-alpha 0\.049"):
        lstm.ValueDistribution(lstm.Args(cvar_alpha=0.049, **flags))
    frozen = {"learning_rate": 0.0, "critic_learning_rate": 1e-3}
    lstm.ValueDistribution(lstm.Args(cvar_alpha=0.01, **flags, **frozen))


# ----------------------------------------------------------------- atoms: V is an output of its own
ALONE = {"value_from": "mean_head", "mean_output": "value"}


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_v_is_the_mean_output_alone(mode):
    """Returns of mean 100 and std 2, where five equal atoms from -1 to 3 have the mean 102. Outputs
    of 6 and -1 are V's of 112 and 98 (van Hasselt et al. 2016), of twins 98 or 105."""
    dist = atoms(**ALONE, twin_reduce=mode)
    set_units(dist, 100, 2)
    outputs = with_v(torch.zeros(2, 5), [6.0, -1.0])
    assert dist.value(outputs).tolist() == pytest.approx([112, 98])
    assert_close(dist.mean(outputs), torch.tensor([102.0, 102]).double())
    value = float(dist.value(dist.reduce_twins(outputs)))
    assert value == pytest.approx({"min": 98, "mean": 105}[mode])


def test_an_output_alone_stays_when_statistics_move():
    """Van Hasselt et al. 2016: V in the task's units, and what clipping measures from, is what it
    was. Logits are not touched."""
    dist = atoms(**ALONE)
    heads, features = twin_heads(dist.num_outputs)
    set_units(dist, 10, 4)
    outputs = outputs_of(heads, features)
    before = 10 + 4 * outputs[..., 5].double()
    old, metrics = move_to(dist, heads, outputs, 300 * torch.randn(7, 4) - 50)
    carried = outputs_of(heads, features)
    assert torch.equal(carried[..., :5], outputs[..., :5])
    assert_close(dist.value(carried), before, rtol=0, atol=3e-3)
    assert_close(old[..., 1], carried[..., 5], rtol=1e-4, atol=1e-5)
    assert float(dist.moments.std) > 100
    assert metrics["norm/value_shift"] < 1e-3  # of V, by rounding; the atoms' mean jumps by far


def test_an_output_alone_stays_at_the_floor():
    """Ours: rescaled from a std of almost 0 the weights would vanish. They stay, and old values are
    what the heads say now."""
    dist = atoms(**ALONE)
    heads, features = twin_heads(dist.num_outputs)
    set_units(dist, 0, 0)
    weights = [head[-1].weight.detach().clone() for head in heads]
    outputs = outputs_of(heads, features)
    old, _ = move_to(dist, heads, outputs, 300 * torch.randn(7, 4) - 50)
    assert all(torch.equal(head[-1].weight, weight) for head, weight in zip(heads, weights))
    assert_close(old[..., 1], outputs[..., 5], rtol=1e-4, atol=1e-5)


def test_an_output_alone_is_fitted_to_returns():
    """Schulman et al. 2017, eq. 9: the output y gets (y - R)^2 / 2, whose gradient is y - R. The
    logits get nothing of it."""
    dist = atoms(**ALONE)
    gradients = []
    for returns in (1.0, 3.0):
        outputs = with_v(torch.tensor([[[0.1, 0.2, 0.0, -0.3, 0.5]]]), [[0.25]]).requires_grad_()
        loss, _ = dist.loss(outputs, torch.full((1, 5), 0.2), torch.tensor([returns]), None)
        gradients.append(torch.autograd.grad(loss.sum(), outputs)[0].flatten())
    assert [float(x[5]) for x in gradients] == pytest.approx([-0.75, -2.75])
    assert torch.equal(gradients[0][:5], gradients[1][:5])


@pytest.mark.parametrize(("move", "clipped"), [(0.1, 0), (0.3, 1)])
def test_an_output_alone_is_clipped_by_itself(move, clipped):
    """Beyond 0.2 from the old output the larger one of two losses counts: R = 1 and y = 0.3 give
    0.7^2 / 2, clipped to 0.2 they give 0.8^2 / 2. The atoms have not moved."""
    dist = atoms(**ALONE, vf_clip="mean_only", vf_clip_coef=0.2)
    logits = torch.zeros(1, 1, 5)
    old = torch.tensor([[[1.0, 0.0]]])  # the mean of five equal atoms, and y
    targets = torch.full((1, 5), 0.2)
    plain, _ = atoms().loss(logits, targets, torch.full((1,), torch.nan), old)
    loss, acted = dist.loss(with_v(logits, [[move]]), targets, torch.ones(1), old)
    assert float(acted) == clipped
    error = {0.1: 0.9, 0.3: 0.8}[move]
    assert float(loss - plain) == pytest.approx(error**2 / 2, rel=1e-5)
