"""Advantages: GAE with time limits, normalisation, explained variance."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ONE_SCRIPT, each_of, with_both_scripts
from helpers import make_run
from torch import Tensor
from torch.testing import assert_close

script = each_of(ONE_SCRIPT)  # both have the same functions

NAMES = ("rewards", "values", "next_values")


def tensor(data: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


def rollout(T: int = 9, N: int = 4, *more: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random rewards, values, next_values and masks in which every combination occurs."""
    floats = [torch.randn(T, N, *more, dtype=dtype) for _ in NAMES]
    return [*floats, torch.rand(T, N) < 0.3, torch.rand(T, N) < 0.3]


def slow_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> list[list[float]]:
    """Every A_t as the sum of (gamma lambda)^k delta_{t+k} up to the end of its episode."""
    T, N = terminated.shape
    advantages = [[0.0] * N for _ in range(T)]
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                bootstrap = 0.0 if terminated[k, n] else gamma * float(next_values[k, n])
                delta = float(rewards[k, n]) + bootstrap - float(values[k, n])
                advantages[t][n] += weight * delta
                weight *= gamma * lam
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantages


def test_gae_of_a_time_limit_and_a_termination_worked_by_hand(script):
    """Schulman et al. 2016, eq. 16: column 0 truncated at t = 1, column 1 terminated at t = 2."""
    rewards = tensor([[1, 0], [2, -2], [-1, 5], [3, 1]])
    values = tensor([[2, 1], [-1, 3], [4, 2], [1, -2]])
    next_values = tensor([[-1, 3], [6, 2], [1, 8], [2, 4]])
    truncated = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]]).bool()
    terminated = torch.tensor([[0, 0], [0, 0], [0, 1], [0, 0]]).bool()
    advantages, returns = script.gae(
        rewards, values, next_values, terminated, truncated, gamma=0.5, gae_lambda=0.8
    )
    # gamma lambda = 0.4
    # column 0, deltas  1 - 0.5 - 2 = -1.5    2 + 3 + 1 = 6    -1 + 0.5 - 4 = -4.5    3 + 1 - 1 = 3
    #   A_3 = 3   A_2 = -4.5 + 0.4 * 3 = -3.3   A_1 = 6 (cut)   A_0 = -1.5 + 0.4 * 6 = 0.9
    # column 1, deltas  0 + 1.5 - 1 = 0.5    -2 + 1 - 3 = -4    5 + 0 - 2 = 3    1 + 2 + 2 = 5
    #   A_3 = 5   A_2 = 3 (cut)   A_1 = -4 + 0.4 * 3 = -2.8   A_0 = 0.5 - 0.4 * 2.8 = -0.62
    assert_close(advantages, tensor([[0.9, -0.62], [6, -2.8], [-3.3, 3], [3, 5]]))
    assert_close(returns, tensor([[2.9, 0.38], [5, 0.2], [0.7, 5], [4, 3]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.7), (0.97, 0), (0.9, 1), (1, 1), (0, 0.5)])
def test_gae_is_the_weighted_sum_of_later_deltas_of_its_episode(script, gamma, lam, dtype):
    """Schulman et al. 2016, eq. 16: the explicit sum, in the dtype of the input; returns A + V."""
    data = rollout(dtype=dtype)
    advantages, returns = script.gae(*data, gamma, lam)
    expected = tensor(slow_gae(*data, gamma, lam))
    assert advantages.dtype == returns.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(advantages.double(), expected, rtol=tolerance, atol=tolerance)
    assert_close(returns.double(), expected + data[1], rtol=tolerance, atol=tolerance)


def test_gae_of_one_step_is_delta(script):
    """Schulman et al. 2016, eq. 16: one step bootstraps from its successor, 2 + 0.5 * 4 - 3 = 1."""
    no = torch.zeros(1, 1, dtype=torch.bool)
    one = [tensor([[x]]) for x in (2, 3, 4)]
    advantages, returns = script.gae(*one, no, no, 0.5, 0.9)
    assert advantages.tolist() == [[1]]
    assert returns.tolist() == [[4]]


@pytest.mark.parametrize("cause", ["terminated", "truncated"])
def test_nothing_after_an_episode_end_reaches_the_steps_before(script, cause):
    """Pardo et al. 2018: the next episode does not leak, neither its rewards nor its values."""
    T, N = 8, 3
    rewards, values, next_values, *_ = rollout(T, N)
    no, ends = torch.zeros(2, T, N, dtype=torch.bool)
    ends[[2, 5, 3, 0], [0, 0, 1, 2]] = True
    masks = (ends, no) if cause == "terminated" else (no, ends)
    before = script.gae(rewards, values, next_values, *masks, 0.99, 0.95)[0]
    for end, n in ends.nonzero().tolist():
        other = [x.clone() for x in (rewards, values, next_values)]
        for x in other:
            x[end + 1 :, n] += 100
        after = script.gae(*other, *masks, 0.99, 0.95)[0]
        assert after[: end + 1].equal(before[: end + 1])
        assert (after[end + 1 :, n] != before[end + 1 :, n]).all()


def test_a_time_limit_bootstraps_and_a_termination_does_not(script):
    """Pardo et al. 2018: dA / dV(s') is gamma at a time limit, 0 at a termination or at both."""
    rewards, values, next_values = (torch.randn(4, 3, dtype=torch.float64) for _ in NAMES)
    terminated, truncated = torch.zeros(2, 4, 3, dtype=torch.bool)
    terminated[2, [1, 2]] = True
    truncated[2, [0, 2]] = True
    masks = (terminated, truncated)
    before = script.gae(rewards, values, next_values, *masks, 0.5, 0.9)[0]
    next_values[2] += 8
    after = script.gae(rewards, values, next_values, *masks, 0.5, 0.9)[0]
    assert_close((after - before)[2], tensor([4, 0, 0]))


def test_terminated_and_truncated_at_once_means_terminated(script):
    """Pardo et al. 2018; both ends at once ours: truncation changes nothing at a termination."""
    rewards, values, next_values, terminated, _ = rollout()
    no = torch.zeros_like(terminated)
    one = script.gae(rewards, values, next_values, terminated, no, 0.9, 0.8)
    both = script.gae(rewards, values, next_values, terminated, terminated, 0.9, 0.8)
    assert one[0].equal(both[0])
    assert one[1].equal(both[1])


def test_gae_of_several_reward_terms_is_that_of_each_alone(script):
    """Schulman et al. 2016, eq. 16: axes behind (T, N) are carried along under the same masks."""
    *floats, terminated, truncated = rollout(6, 4, 3, 2)
    advantages, returns = script.gae(*floats, terminated, truncated, 0.9, 0.8)
    for i in range(3):
        for j in range(2):
            alone = [x[..., i, j] for x in floats]
            expected = script.gae(*alone, terminated, truncated, 0.9, 0.8)
            assert_close((advantages[..., i, j], returns[..., i, j]), expected)


def test_gae_leaves_its_arguments_alone(script):
    """Schulman et al. 2016, eq. 16, as a pure function: no argument is changed in place."""
    data = rollout()
    copies = [x.clone() for x in data]
    script.gae(*data, 0.9, 0.8)
    assert all(x.equal(y) for x, y in zip(data, copies))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("index", range(3), ids=NAMES)
def test_gae_refuses_entries_that_are_not_finite(script, index, bad):
    """Ours: a NaN names its origin; ValueError with the tensor and the number of bad entries."""
    data = rollout()
    data[index][1, 2] = data[index][4, 0] = bad
    with pytest.raises(ValueError, match=rf"\b{NAMES[index]}\b") as error:
        script.gae(*data, 0.9, 0.8)
    assert re.search(r"\b2\b", str(error.value))


@pytest.mark.parametrize("mask", [3, 4], ids=["terminated", "truncated"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_gae_refuses_masks_of_numbers(script, mask, dtype):
    """Ours: ~1 is -2, so a mask of integers would give wrong advantages without a word."""
    data = list(rollout())
    data[mask] = data[mask].to(dtype)
    with pytest.raises(TypeError, match="must be tensors of bool"):
        script.gae(*data, 0.9, 0.8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_advantages_worked_by_hand(script, dtype):
    """Ours: population std over all entries of a rollout, not per environment, not with n - 1."""
    # mean (1 + 3 + 8 + 0 - 2 + 2) / 6 = 2; squares 1 + 1 + 36 + 4 + 16 + 0 = 58; 1 / std = 0.32163
    advantages = torch.tensor([[1, 3, 8], [0, -2, 2]], dtype=dtype)
    expected = [[-0.3216338, 0.3216338, 1.9298026], [-0.6432675, -1.286535, 0]]
    out = script.normalize_advantages(advantages)
    assert_close(out, tensor(expected, dtype), rtol=1e-6, atol=1e-6)
    assert advantages.tolist() == [[1, 3, 8], [0, -2, 2]]


@pytest.mark.parametrize("exponent", range(-12, 1))
def test_normalize_advantages_adds_eps_at_every_scale(script, exponent):
    """Ours: s / (s + eps) for entries -s and s; a branch on std would be discontinuous."""
    s = 10.0**exponent
    for eps in (1e-8, 0.25):
        expected = tensor([-s / (s + eps), s / (s + eps)])
        assert_close(script.normalize_advantages(tensor([-s, s]), eps), expected)
    expected = tensor([-1, 1]) * (s / (s + 1e-8))  # the default
    assert_close(script.normalize_advantages(tensor([-s, s])), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.1, -3.3, 1e6 + 0.3])
def test_normalize_advantages_of_constant_input_is_zero(script, dtype, constant):
    """Ours: exactly 0, one entry included, as 1 / eps would amplify the rounding of the mean."""
    for n in range(1, 30):
        out = script.normalize_advantages(torch.full((n, 1), constant, dtype=dtype))
        assert out.equal(torch.zeros(n, 1, dtype=dtype))


@pytest.mark.parametrize("processes", [2, 3, 6, 7, 48])
def test_constant_input_of_many_processes_is_zero(script, processes):
    """x / 6, six times, need not add up to x. What is left over must stay far below eps, also where
    eps is 1e-30, as in training."""

    def across(x):
        return sum([x / processes] * processes)

    for constant in (1 / 3, -0.7, 123.456, 1e6 + 0.1):
        advantages = torch.full((341, 1), constant, dtype=torch.float64)
        assert across(advantages[0, 0]) == pytest.approx(constant)
        out = script.normalize_advantages(advantages, 1e-30, across)
        assert float(out.abs().max()) < 1e-6


def divisors(run: SimpleNamespace, *stds: float) -> list[float]:
    """What advantages are divided by in rollouts of these standard deviations, mean 5."""
    found = []
    for std in stds:
        signs = tensor([[1, -1], [-1, 1]])
        scaled = run.script.scale_advantages(run.agent, 5 + std * signs, run.args)
        assert_close(scaled, scaled[0, 0] * signs)
        found.append(std / float(scaled[0, 0]))
    return found


def test_advantages_are_divided_by_no_less_than_is_usual(script):
    """Ours: the larger of std and its root mean square over rollouts, this one included.

    Stds 3, 4, 1: sqrt((9 + 16) / 2) is less than 4, but sqrt((9 + 16 + 1) / 3) is more than 1.
    """
    run = make_run(script, "Walk", norm_adv_memory=10)
    assert divisors(run, 3, 4, 1) == pytest.approx([3, 4, (26 / 3) ** 0.5])


@with_both_scripts
def test_the_memory_of_advantages_is_of_ten_rollouts(script):
    """Ours: std 100, then 1: after ten in all (100^2 + 9) / 10, then a tenth beside ten fades."""
    run = make_run(script, "Walk", norm_adv_memory=10)
    found = divisors(run, 100, *[1] * 10)
    assert found[9] == pytest.approx(1000.9**0.5)
    assert found[10] == pytest.approx(((10 * 1000.9 + 1) / 11) ** 0.5)
    run = make_run(script, "Walk", norm_adv_memory=1)  # half of it is gone each time
    assert divisors(run, 100, 1, 1) == pytest.approx([100, 5000.5**0.5, 2500.75**0.5])


@pytest.mark.parametrize("memory", [0, 10])
@pytest.mark.parametrize("std", [1e-20, 1e-6, 1.0, 1e18])
def test_advantages_in_any_unit_are_scaled_alike(script, std, memory):
    """Ours: std 1, or less beside what came before. What does not vary gives zeros."""
    run = make_run(script, "Walk", norm_adv_memory=memory)
    for size, divisor in ((1, 1), (1e3, 1), (1, (1 + 1e6 + 1) / 3)):
        advantages = size * std * tensor([3, -1])
        found = run.script.scale_advantages(run.agent, advantages, run.args)
        expected = divisor**-0.5 if memory else 1
        assert_close(found, expected * tensor([1, -1]))
    found = run.script.scale_advantages(run.agent, tensor([7, 7]), run.args)
    assert found.tolist() == [0, 0]


def test_a_rollout_without_any_advantage_gives_zeros(script):
    """Ours: nothing has varied so far, and 0 / 0 is no number."""
    run = make_run(script, "Walk", norm_adv_memory=10)
    found = run.script.scale_advantages(run.agent, torch.zeros(4, 2).double(), run.args)
    assert found.equal(torch.zeros(4, 2).double())


@pytest.mark.parametrize("flags", [{"norm_adv": False}, {"norm_adv_memory": 0}])
def test_without_a_memory_nothing_is_remembered(script, flags):
    """Ours: --no-norm-adv also gives advantages back as they are."""
    run = make_run(script, "Walk", **flags)
    before = {key: x.clone() for key, x in run.agent.adv_moments.state_dict().items()}
    found = run.script.scale_advantages(run.agent, tensor([3, -1]), run.args)
    assert found.tolist() == ([3, -1] if "norm_adv" in flags else [1, -1])
    assert_close(dict(run.agent.adv_moments.state_dict()), before)


def test_the_memory_of_advantages_is_saved_with_the_weights(script):
    """Ours: a loaded agent divides as the old one would."""
    old, new = (make_run(script, "Walk", norm_adv_memory=10) for _ in range(2))
    divisors(old, 8, 2)
    new.agent.load_state_dict(old.agent.state_dict())
    assert divisors(new, 1) == divisors(old, 1) == pytest.approx([(69 / 3) ** 0.5])


def test_explained_variance_worked_by_hand(script):
    """Ours: 1 - Var(error) / Var(targets); a constant bias costs nothing."""
    targets = tensor([[1, 2, 3], [6, 8, 10]])  # mean 5, squares 16 + 9 + 4 + 1 + 9 + 25 = 64
    errors = tensor([[1, -1, 0], [3, 0, 3]])  # mean 1, squares 0 + 4 + 1 + 4 + 1 + 4 = 14
    assert float(script.explained_variance(targets - errors, targets)) == pytest.approx(50 / 64)
    assert float(script.explained_variance(targets + 7, targets)) == pytest.approx(1)
    assert float(script.explained_variance(0 * targets - 2, targets)) == pytest.approx(0)
    assert float(script.explained_variance(-targets, targets)) == pytest.approx(-3)


def test_explained_variance_is_not_symmetric(script):
    """Ours: divided by the variance of the targets, not of the predictions."""
    small, large = tensor([0, 1, 2]), tensor([0, 2, 4])
    assert float(script.explained_variance(small, large)) == pytest.approx(0.75)
    assert float(script.explained_variance(large, small)) == pytest.approx(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explained_variance_of_constant_targets_is_zero(script, dtype):
    """Ours: neither NaN nor a huge number from rounding; a single target is constant, too."""
    for n in range(1, 20):
        predictions = torch.randn(n, dtype=dtype)
        for constant in (0.0, 0.1, -1e6 - 0.3):
            targets = torch.full((n,), constant, dtype=dtype)
            assert float(script.explained_variance(predictions, targets)) == 0
            assert float(script.explained_variance(targets, targets)) == 0


def test_explained_variance_is_zero_where_the_variance_underflows(script):
    """Ours: targets that differ by less than float32 can square give no 0 / 0."""
    x = torch.tensor([0, 1e-30])
    assert float(script.explained_variance(x, x)) == 0


def test_explained_variance_of_targets_that_vary_little(script):
    """Ours, unit-free: targets 0 and 0.2 by predictions 0.05 and 0.15: 1 - 0.05^2 / 0.1^2."""
    predictions = tensor([0.05, 0.15])
    assert float(script.explained_variance(predictions, tensor([0, 0.2]))) == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["rewards", "values", "next_values", "terminated", "truncated"])
@pytest.mark.parametrize("change", [lambda x: x[0], lambda x: x[..., None], lambda x: x[:, :1]])
def test_shapes_that_would_be_broadcast_are_refused(script, name, change):
    """A row that stands for all steps, one more axis, and one environment that stands for all."""
    names = (*NAMES, "terminated", "truncated")
    inputs = dict(zip(names, rollout(5, 3)))
    with pytest.raises(ValueError, match=r"^gae: the shapes of rewards, values"):
        script.gae(**inputs | {name: change(inputs[name])}, gamma=0.9, gae_lambda=0.9)
    terms = {key: torch.randn(5, 3, 2) for key in NAMES}
    with pytest.raises(ValueError, match=r"^gae: the shapes"):
        script.gae(**inputs | terms | {"values": inputs["values"]}, gamma=0.9, gae_lambda=0.9)
    never = torch.tensor(False)  # for all steps at once
    with pytest.raises(ValueError, match=r"^gae: the shapes"):
        script.gae(**inputs | {"terminated": never, "truncated": never}, gamma=0.9, gae_lambda=0.9)


def test_a_rollout_without_steps_is_refused(script):
    """By one line, and not where the recursion begins."""
    with pytest.raises(ValueError, match=r"^gae: there are no steps$"):
        script.gae(*rollout(0, 3), 0.9, 0.9)


def test_predictions_of_another_shape_are_refused(script):
    """(B,) and (B, 1) would give (B, B)."""
    with pytest.raises(ValueError, match=r"predictions and targets are \(3,\) and \(3, 1\)"):
        script.explained_variance(torch.zeros(3), torch.zeros(3, 1))


def test_explained_variance_of_targets_that_are_no_numbers_is_none(script):
    """They are not constant."""
    targets = torch.tensor([1.0, float("nan")])
    assert script.explained_variance(torch.zeros(2), targets).isnan()
