"""Policy losses, the linear schedule and the CVaR of a sample."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close


def tensor(data: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_policy_loss_worked_by_hand(script, dtype):
    """Ratios below, inside and above the range, each with both signs of the advantage."""
    ratio = tensor([2, 2, 0.5, 0.5, 1.125], dtype)
    advantages = tensor([3, -1, 4, -2, 8], dtype)
    # range [0.75, 1.25]; min of r A and clip(r) A:
    #   min(6, 3.75) = 3.75  min(-2, -1.25) = -2  min(2, 3) = 2  min(-1, -1.5) = -1.5  9
    #   sum 11.25, loss -2.25
    # (r - 1) - log r: 1 - ln 2 twice, -1/2 + ln 2 twice, 1/8 - ln 1.125; 4 of 5 ratios are outside
    out = script.clipped_policy_loss(ratio.log(), advantages, 0.25)
    assert all(x.dtype == dtype and x.dim() == 0 for x in out)
    expected = (-2.25, (2 - 1 + 1 / 8 - math.log(1.125)) / 5, 0.8)
    assert [float(x) for x in out] == pytest.approx(expected, rel=1e-6)


def test_policy_loss_is_flat_only_where_the_clip_binds(script):
    """d loss / d log r = -A r / B, and 0 where the ratio is past the clip in A's direction."""
    ratio = tensor([2, 2, 0.5, 0.5, 1.125])
    advantages = tensor([3, -1, 4, -2, 8])
    log_ratio = ratio.log().requires_grad_()
    script.clipped_policy_loss(log_ratio, advantages, 0.25)[0].backward()
    assert_close(log_ratio.grad, tensor([0, 2, -2, 0, -9]) / 5)


def test_a_ratio_of_150_with_a_negative_advantage_keeps_its_gradient(script):
    """The ratio is not clamped ahead of the minimum: -A r = 300 for A = -2, r = 150."""
    log_ratio = tensor([math.log(150)]).requires_grad_()
    loss = script.clipped_policy_loss(log_ratio, tensor([-2]), 0.2)[0]
    loss.backward()
    assert loss.item() == pytest.approx(300)
    assert log_ratio.grad.item() == pytest.approx(300)


def test_policy_loss_passes_gradcheck(script):
    """Finite differences, away from the edges of the range."""
    log_ratio = tensor([0.5, 0.6, -0.5, -0.7, 0.1, -0.05]).requires_grad_()
    advantages = tensor([3, -1, 4, -2, 8, -5])
    assert torch.autograd.gradcheck(
        lambda x: script.clipped_policy_loss(x, advantages, 0.2)[0], log_ratio
    )


def test_log_ratios_are_clamped_to_20(script):
    """The limit of both sides is 20, inside of it nothing changes, and nothing overflows."""
    for sign in (-1, 1):
        for size, used in ((19, 19), (21, 20), (1e4, 20)):
            log_ratio = tensor([sign * size]).requires_grad_()
            ratio = math.exp(sign * used)
            loss, kl, fraction = script.clipped_policy_loss(log_ratio, tensor([-1]), 0.2)
            loss.backward()
            assert loss.item() == pytest.approx(max(ratio, 0.8))
            assert float(kl) == pytest.approx(ratio - 1 - sign * used)
            assert float(fraction) == 1
            assert float(log_ratio.grad) == pytest.approx(ratio if 0 < sign * size < 20 else 0)


def test_approx_kl_is_positive_but_for_a_ratio_of_one(script):
    """k3 is >= 0 sample by sample, whatever the sign of the log ratio."""
    for size in (0.001, 0.1, 1, 5, 30):
        for log_ratio in (-size, size):
            assert float(script.clipped_policy_loss(tensor([log_ratio]), tensor([1]), 0.2)[1]) > 0
    assert float(script.clipped_policy_loss(tensor([0]), tensor([1]), 0.2)[1]) == 0


def test_clip_fraction_counts_strictly_more_than_eps(script):
    """A ratio of exactly 1 is inside even the empty range; one beside it on either side is not."""
    for log_ratio, expected in (([0, 0], 0), ([0, 1e-3], 0.5), ([-1e-3, 0, 0, 0], 0.25)):
        out = script.clipped_policy_loss(tensor(log_ratio), tensor(log_ratio), 0.0)
        assert float(out[2]) == expected


def test_policy_loss_leaves_its_arguments_alone(script):
    """No argument is changed in place, not even a log ratio outside [-20, 20]."""
    log_ratio, advantages = tensor([-50, 0.5, 50]), tensor([1, -2, 3])
    script.clipped_policy_loss(log_ratio, advantages, 0.2)
    assert log_ratio.tolist() == [-50, 0.5, 50]
    assert advantages.tolist() == [1, -2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_loss_worked_by_hand(script, dtype):
    """Mean of [1, 2, 6] is 3: the bonus is 0.1 * 3; a floor of 5 is missed by 2, one of 2 by 0."""
    entropy = tensor([1, 2, 6], dtype)
    for floor, expected in ((5, -0.3 + 7 * 2), (2, -0.3), (3, -0.3)):
        loss = script.entropy_loss(entropy, 0.1, floor, 7)
        assert loss.dtype == dtype
        assert loss.dim() == 0
        assert float(loss) == pytest.approx(expected)
    assert float(script.entropy_loss(entropy, 0.1, 5, 0)) == pytest.approx(-0.3)
    assert float(script.entropy_loss(-entropy, 0.1, 0, 7)) == pytest.approx(0.3 + 21)


def test_entropy_is_counted_once(script):
    """loss(H1) - loss(H2) has the closed form above and below the floor, and so has the slope."""
    first, second = tensor([1, 4, 4]).requires_grad_(), tensor([2, 6, 10])  # means 3 and 6
    for floor, slope in ((2, -0.1), (20, -7.1)):
        loss = script.entropy_loss(first, 0.1, floor, 7)
        difference = loss - script.entropy_loss(second, 0.1, floor, 7)
        assert difference.item() == pytest.approx(slope * (3 - 6))
        (grad,) = torch.autograd.grad(loss, first)
        assert_close(grad, torch.full_like(first, slope / 3))


def test_linear_schedule_goes_from_start_to_end_and_stays(script):
    """Progress is clamped to [0, 1]; the line may rise or fall."""
    for start, end in ((3.0, 1.0), (0.0, 0.5), (-1.0, 4.0)):
        expected = {-0.5: start, 0: start, 0.25: 0.75 * start + 0.25 * end, 1: end, 1.5: end}
        for progress, value in expected.items():
            assert script.linear_schedule(start, end, progress) == pytest.approx(value)


def test_empirical_cvar_worked_by_hand(script):
    """Half of five returns is two and a half: (-5 - 1 + 0.5 * 3) / 2.5 = -1.8."""
    returns = tensor([3, -1, 10, 4, -5])
    cvar = script.empirical_cvar(returns, 0.5)
    assert isinstance(cvar, float)
    assert cvar == pytest.approx(-1.8)
    assert script.empirical_cvar(returns, 1) == pytest.approx(2.2)
    assert script.empirical_cvar(returns, 0.4) == pytest.approx(-3)
    assert script.empirical_cvar(returns, 0.05) == pytest.approx(-5)  # a quarter of one return
    assert script.empirical_cvar(tensor([7]), 0.05) == pytest.approx(7)
    assert returns.tolist() == [3, -1, 10, 4, -5]


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.13, 0.5, 0.99, 1])
def test_empirical_cvar_is_the_mean_of_the_lowest_thousandths(script, alpha):
    """Equal to the plain mean over the lowest part of 1000 copies of every return."""
    returns = torch.randn(17, dtype=torch.float64) * 30 - 5
    copies = sorted(returns.tolist() * 1000)
    lowest = copies[: round(alpha * len(copies))]
    expected = sum(lowest) / len(lowest)
    assert script.empirical_cvar(returns, alpha) == pytest.approx(expected, rel=1e-6)
    assert script.empirical_cvar(returns.flip(0), alpha) == pytest.approx(expected, rel=1e-6)
    assert script.empirical_cvar(returns.float(), alpha) == pytest.approx(expected, rel=1e-5)


def test_approx_kl_is_not_negative_near_ratio_one(script):
    """In float32 exp(x) - 1 - x is rounding noise for small x, with either sign."""
    for exponent in range(-12, 1):
        for sign in (-1, 1):
            log_ratio = torch.tensor([sign * 10.0**exponent])
            kl = script.clipped_policy_loss(log_ratio, torch.ones(1), 0.2)[1]
            expected = math.expm1(log_ratio.item()) - log_ratio.item()
            assert kl >= 0
            assert kl.item() == pytest.approx(expected, rel=0.01, abs=1e-9)
