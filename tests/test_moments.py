"""Running moments and the rescaling of a head that keeps decoded values (PopArt)."""

import copy
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import is_recurrent, small_args
from torch import Tensor, nn
from torch.testing import assert_close

from distributional_ppo_lstm import RunningMoments, rescale_head


def tensor(data: list | float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


def of(
    module: ModuleType,
    *batches: Tensor,
    shape: tuple[int, ...] = (),
    max_count: float | None = None,
) -> nn.Module:
    """Moments that have taken in the batches."""
    moments = module.RunningMoments(shape, max_count)
    for batch in batches:
        moments.update(batch)
    return moments


def test_moments_worked_by_hand(script):
    """Chan et al. 1983: (1, 3) merged with (4, 8, 9, 5), twice the size; moments of all six."""
    moments = of(script, tensor([1, 3]))
    assert [float(x) for x in (moments.mean, moments.var, moments.count)] == [2, 1, 2]
    moments.update(tensor([4, 8, 9, 5]))
    # mean 30 / 6 = 5; squares 16 + 4 + 1 + 9 + 16 + 0 = 46, over 6
    assert [float(moments.mean), float(moments.var)] == pytest.approx([5, 46 / 6])
    assert float(moments.count) == 6


def test_moments_computed_elsewhere_are_merged(script):
    """Chan et al. 1983: mean 6.5 and variance 17 / 4 of (4, 8, 9, 5) do what the four data do."""
    moments = of(script, tensor([1, 3]))
    moments.merge(tensor(6.5), tensor(17 / 4), weight=4)
    assert [float(moments.mean), float(moments.var)] == pytest.approx([5, 46 / 6])
    assert float(moments.count) == 6
    fresh = script.RunningMoments(max_count=2)
    fresh.merge(tensor(6.5), tensor(17 / 4), weight=4)
    assert [float(x) for x in (fresh.mean, fresh.var, fresh.count)] == [6.5, 17 / 4, 2]


def test_a_count_beyond_the_memory_counts_as_the_memory(script):
    """Weights of a run with a longer memory: a mean of 1 that stands for 1000, with a memory of 10,
    and a new mean of 12 that stands for 1. (10 * 1 + 12) / 11 = 2."""
    moments = script.RunningMoments(max_count=10)
    moments.mean, moments.count = tensor(1.0), tensor(1000.0)
    moments.merge(tensor(12.0), tensor(0.0), weight=1)
    assert float(moments.mean) == pytest.approx(2)
    assert float(moments.count) == 10


def test_moments_of_batches_are_those_of_all_their_data(script):
    """Chan et al. 1983: any number of batches of any sizes, axis by axis, population variance."""
    batches = [torch.randn(n, 2, 3) * (n + 1) + n for n in (1, 5, 1, 12, 3)]
    moments = of(script, *batches, shape=(2, 3))
    data = torch.cat(batches).numpy().astype(np.float64)
    np.testing.assert_allclose(moments.mean, data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, data.var(0), rtol=1e-12)
    assert float(moments.count) == len(data) == 22
    assert moments.mean.shape == moments.var.shape == (2, 3)


def test_axes_ahead_of_the_shape_are_samples(script):
    """Chan et al. 1983: (T, N, D) and (T N, D) are the same data; scalars (T, N) and (T N,) too."""
    x = torch.randn(5, 4, 3)
    for shape in ((3,), ()):
        flat = x.reshape(-1, *shape)
        one, two = of(script, x, shape=shape), of(script, flat, shape=shape)
        assert_close(dict(one.state_dict()), dict(two.state_dict()))
        assert float(one.count) == len(flat)
        assert one.mean.shape == shape


@pytest.mark.parametrize("max_count", [None, 1, 3, 1000])
def test_the_first_update_gives_exactly_the_moments_of_its_batch(script, max_count):
    """Chan et al. 1983: the count starts at 0, nothing is left of the initial values."""
    batch = tensor([[5, -2], [7, 2], [12, 3]])
    moments = of(script, batch, shape=(2,), max_count=max_count)
    assert_close(moments.mean, tensor([8, 1]))  # squares 9 + 1 + 16 and 9 + 1 + 4
    assert_close(moments.var, tensor([26 / 3, 14 / 3]))
    assert float(moments.count) == min(3, max_count or 3)


@pytest.mark.parametrize("max_count", [None, 1, 3, 1000])
def test_the_first_update_may_be_of_one_sample(script, max_count):
    """Chan et al. 1983: the sample itself, without spread, whatever the cap."""
    moments = of(script, tensor([[5, -2]]), shape=(2,), max_count=max_count)
    assert moments.mean.tolist() == [5, -2]
    assert moments.var.tolist() == [0, 0]


def test_old_data_fade_above_the_cap(script):
    """Chan et al. 1983 with a cap of ours: four samples at 0 count as two beside two at 3.

    Mean 1.5, variance 1.5^2; two more at 3: mean 2.25, variance (2.25 + 0) / 2 + (1.5 / 2)^2.
    """
    moments = of(script, tensor([0, 0, 0, 0]), max_count=2)
    moments.update(tensor([3, 3]))
    assert [float(moments.mean), float(moments.var)] == pytest.approx([1.5, 2.25])
    moments.update(tensor([3, 3]))
    assert [float(moments.mean), float(moments.var)] == pytest.approx([2.25, 1.6875])
    assert float(moments.count) == 2


def test_without_a_cap_nothing_fades(script):
    """Chan et al. 1983: four samples at 0 and twice two at 3, mean 12 / 8."""
    moments = of(script, tensor([0, 0, 0, 0]), tensor([3, 3]), tensor([3, 3]))
    assert [float(moments.mean), float(moments.count)] == pytest.approx([1.5, 8])


def test_count_below_the_cap_is_kept(script):
    """Chan et al. 1983 with a cap of ours: it bounds the count and does not replace it."""
    moments = of(script, tensor([1, 2]), max_count=5)
    assert float(moments.count) == 2
    moments.update(tensor([1, 2, 3]))
    assert float(moments.count) == 5


def test_variance_survives_a_large_mean(script):
    """Chan et al. 1983: unit variance at 1e9, where E[x^2] - E[x]^2 has lost all digits."""
    pair = 1e9 + tensor([-1, 1])
    moments = of(script, pair.repeat(2), pair, pair.repeat(7))
    assert float(moments.mean) == pytest.approx(1e9, abs=1e-6)
    assert float(moments.var) == pytest.approx(1, abs=1e-6)


def test_normalize_worked_by_hand(script):
    """Van Hasselt et al. 2016: mean 2 and variance 9, 8 is two deviations above, and back."""
    moments = of(script, tensor([-1, 5]))
    assert moments.normalize(tensor([8, -1])).tolist() == pytest.approx([2, -1])
    assert moments.denormalize(tensor([2, -1])).tolist() == pytest.approx([8, -1])


def test_std_has_a_floor_inside_the_root(script):
    """Ours: sqrt(var + (1e-7 mean)^2 + 1e-60) is finite for constant data and knows no units."""
    moments = of(script, tensor([7, 7, 7]))
    assert float(moments.normalize(tensor(7 + 3 * 7e-7))) == pytest.approx(3, rel=1e-6)
    assert float(moments.denormalize(tensor(3))) == pytest.approx(7 + 3 * 7e-7, rel=1e-12)
    moments = of(script, tensor([-4e-8, 4e-8]) + 1)  # as much as the floor: sqrt(16 + 100) e-8
    assert float(moments.std) == pytest.approx(116**0.5 * 1e-8)
    assert float(of(script, tensor([0, 0])).std) == pytest.approx(1e-30)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4, 1e18])
def test_data_in_any_unit_are_normalised_alike(script, scale):
    """Ours: observations times s, of whatever s; an entry that never varies gives 0."""
    x = torch.randn(40, 4) * torch.tensor([1, 30, 1, 1]) + torch.tensor([0, 100, -0.3, 0])
    x[:, 2:] = torch.tensor([-0.3, 0])
    expected = (x - x.mean(0)) / x.std(0, correction=0).clamp(min=1e-3)
    expected[:, 2:] = 0
    moments = of(script, scale * x[:20], scale * x[20:], shape=(4,))
    assert_close(moments.normalize(scale * x), expected, rtol=1e-4, atol=1e-4)


def test_moments_without_data_change_nothing(script):
    """Ours: mean 0 and std 1, to the floor, until the first update."""
    moments, x = script.RunningMoments((3,)), torch.randn(4, 3)
    assert float(moments.count) == 0
    assert_close(moments.normalize(x), x)
    assert_close(moments.denormalize(x), x)


def test_an_empty_batch_changes_no_moments(script):
    """Its mean would be 0 / 0, and stay so for ever."""
    moments = script.RunningMoments((3,))
    moments.update(torch.empty(0, 3))
    moments.update(torch.tensor([[1.0, 2, 3], [3, 2, 1]]))
    moments.update(torch.empty(0, 3))
    assert moments.mean.tolist() == [2, 2, 2]
    assert moments.var.tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "axes"), [((), (0, 1)), ((3,), (0,))])
def test_normalize_keeps_dtype_and_inverts(script, shape, axes, dtype):
    """Ours: statistics in float64 do not turn the network's float32 into float64."""
    x = torch.randn(5, 3, dtype=dtype) * 40 + 7
    before = x.clone()
    moments = of(script, x, shape=shape)
    z = moments.normalize(x)
    back = moments.denormalize(z)
    assert z.dtype == back.dtype == dtype
    assert_close(back, x)
    assert_close(z, (x - x.mean(axes)) / x.std(axes, correction=0))
    assert x.equal(before)
    assert all(b.dtype == torch.float64 for b in moments.buffers())


def test_normalize_resolves_float32_far_from_zero(script):
    """The mean is 1e6 + 0.34. In float32, whose steps are 1/16 there, it would be 1e6 + 0.3125, so
    the first difference would be 0 and the second one 0.0625."""
    moments = script.RunningMoments(())
    moments.mean.fill_(1e6 + 0.34)
    x = torch.tensor([1e6 + 0.3125, 1e6 + 0.375])  # exact in float32
    assert_close(moments.normalize(x), torch.tensor([-0.0275, 0.035]) / moments.std.float())


def test_update_takes_integers(script):
    """Ours: counts are data like any other; 1, 2 and 4 have mean 7 / 3."""
    assert float(of(script, torch.tensor([1, 2, 4])).mean) == pytest.approx(7 / 3)


def test_update_records_no_graph(script):
    """Ours: moments are data, no gradient flows into them, but normalising passes it on."""
    x = tensor([-1, 5]).requires_grad_()
    moments = of(script, x)
    assert not any(b.requires_grad for b in moments.buffers())
    (grad,) = torch.autograd.grad(moments.normalize(x).sum(), x)
    assert grad.tolist() == pytest.approx([1 / 3, 1 / 3])
    (grad,) = torch.autograd.grad(moments.denormalize(x).sum(), x)
    assert grad.tolist() == pytest.approx([3, 3])


def test_moments_are_saved_with_the_weights(script):
    """Ours: a fresh module that loads the state goes on as the old one would."""
    old = of(script, torch.randn(6, 2), shape=(2,), max_count=8)
    new = script.RunningMoments((2,), 8)
    new.load_state_dict(old.state_dict())
    batch = torch.randn(3, 2) + 4
    for moments in (old, new):
        moments.update(batch)
    assert_close(dict(new.state_dict()), dict(old.state_dict()), rtol=0, atol=0)
    assert set(old.state_dict()) == {"mean", "var", "count"}


def test_a_copy_of_the_moments_stays_where_it_was(script):
    """Ours: the statistics before an update can be kept beside those after it, for PopArt."""
    moments = of(script, tensor([1, 3]))
    before, views = copy.deepcopy(moments), (moments.mean, moments.var)
    moments.update(tensor([10, 30]))
    assert [float(before.mean), float(before.var), float(before.count)] == [2, 1, 2]
    assert [float(x) for x in views] == [2, 1]
    assert float(moments.mean) == 11


# ------------------------------------------------------------------ what statistics take of returns
def statistics_of(
    script: ModuleType, samples: Tensor, values: Tensor, copies: list | None = None
) -> nn.Module:
    """Moments of fresh statistics that have taken in samples (T, N, J) of the return.

    Critics say `values`, (T, N) or (C, T, N). Sample j of each step counts as `copies[j]` of them.
    """
    copies = torch.tensor(copies or [1] * samples.shape[-1])
    dist = script.ValueDistribution(small_args(script, "Walk"))  # V has an output of its own
    outputs = torch.zeros(*values.shape, dist.num_outputs, dtype=torch.float64)
    if is_recurrent(script):
        outputs[..., -1] = values
        targets = samples.repeat_interleave(copies, -1)
    else:  # atoms are as far below 0 as above
        outputs[..., -1] = values / 0.1
        probs = (copies / copies.sum(dtype=torch.float64)).expand(samples.shape)
        targets = script.WeightedReturns(samples, probs)
    outputs = outputs if values.dim() == 3 else outputs[None]
    dist.move_statistics(nn.ModuleList(), outputs, targets)
    return dist.moments


def taken_in(script: ModuleType, targets: list, values: list) -> list[float]:
    """Mean and standard deviation of moments after targets and values of some steps, (T, N)."""
    moments = statistics_of(script, tensor(targets)[..., None], tensor(values))
    return [float(moments.mean), float(moments.std)]


def test_values_that_do_not_vary_leave_the_scale_to_the_targets(script):
    """Ours: targets -3, 1, 5 and 9 have mean 3 and variance (36 + 4 + 4 + 36) / 4 = 20; V is 3."""
    found = taken_in(script, [[-3, 1], [5, 9]], [[3, 3], [3, 3]])
    assert found == pytest.approx([3, 20**0.5])  # not with 0 averaged in, sqrt(20 / 2)


def test_constant_targets_leave_the_scale_to_what_the_critics_are_off(script):
    """Ours: targets 2; V is off by 1, -5, 3 and 1, the squares 1 + 25 + 9 + 1 over 4 are 9."""
    found = taken_in(script, [[2, 2], [2, 2]], [[3, -3], [5, 3]])
    assert found == pytest.approx([2, 3])


def test_the_larger_of_spread_and_error_is_the_scale(script):
    """Ours: of targets 0 and 4 the std is 2; V beside them, off their mean by 1 or by 3."""
    assert taken_in(script, [[0, 4]], [[1, 3]]) == pytest.approx([2, 2])
    assert taken_in(script, [[0, 4]], [[5, -1]]) == pytest.approx([2, 3])


def test_the_error_is_that_of_all_critics(script):
    """Ours: targets 2; one critic is off by 1 and -1, the other by 3 and 5: 36 / 4 = 9."""
    samples, values = tensor([[[2], [2]]]), tensor([[[3, 1]], [[5, 7]]])
    moments = statistics_of(script, samples, values)
    assert [float(moments.mean), float(moments.std)] == pytest.approx([2, 3])


def test_statistics_take_in_weighted_samples_as_one_rollout(script):
    """Ours: mean and scale of all samples by their weights.

    1 and 5 with weights 3/4 and 1/4, then 6 and 2: means 2 and 5, of both 3.5; squares of the
    distances 3/4 * 2.5^2 + 1/4 * 1.5^2 = 5.25 and 3/4 * 2.5^2 + 1/4 * 1.5^2 = 5.25.
    """
    samples, values = tensor([[[1, 5]], [[6, 2]]]), tensor([[3], [4]])
    moments = statistics_of(script, samples, values, copies=[3, 1])
    assert [float(moments.mean), float(moments.var)] == pytest.approx([3.5, 5.25])
    assert float(moments.count) == 1


def test_statistics_have_the_moments_of_all_samples(script):
    """Chan et al. 1983: they are those of 3 x 2 x 40 equal weights, and count as one rollout."""
    samples = torch.randn(3, 2, 40, dtype=torch.float64) * 5 + 2
    moments = statistics_of(script, samples, samples.mean(-1))
    assert float(moments.mean) == pytest.approx(float(samples.mean()))
    assert float(moments.var) == pytest.approx(float(samples.var(correction=0)))
    assert float(moments.count) == 1


def test_first_return_moments_worked_by_hand(script):
    """Ours: sums of rewards to an end or to the last step, gamma 0.5, without any value.

    Column 0 is terminated at t = 1: 1 + 0.5 * 4 = 3, 4, 2. Column 1 is truncated at t = 0: -3, then
    6 + 0.5 * 4 = 8 and 4. Mean 18 / 6 = 3; squares 0 + 1 + 1 + 36 + 25 + 1 = 64.
    """
    ends = torch.zeros(2, 3, 2, dtype=torch.bool)
    ends[0, 1, 0] = ends[1, 0, 1] = True
    rewards = tensor([[1, -3], [4, 6], [2, 4]])
    rollout = SimpleNamespace(rewards=rewards, terminated=ends[0], truncated=ends[1])
    mean, var = script.first_return_moments(rollout, SimpleNamespace(gamma=0.5))
    assert_close(mean, tensor(3))
    assert_close(var, tensor(64 / 6))


def test_batch_moments_worked_by_hand(script):
    """Ours: over the first axis, column by column, with n: squares 4+1+9+16 and 9+4+1+0."""
    mean, var = script.batch_moments(tensor([[1, -2], [4, 3], [0, 2], [7, 1]]))
    assert mean.tolist() == [3, 1]
    assert var.tolist() == [30 / 4, 14 / 4]


# ------------------------------------------------------------------------------------------ PopArt
def test_rescale_head_worked_by_hand():
    """Van Hasselt et al. 2016, eq. 5, for s = 3, s' = 6, mu = 10, mu' = 4.

    w' = w s / s' and b' = (s b + mu - mu') / s'.
    """
    linear = nn.Linear(1, 2)
    with torch.no_grad():
        linear.weight.copy_(tensor([[2], [-4]]))
        linear.bias.copy_(tensor([1, -2]))
    rescale_head(linear, tensor(10), tensor(3), tensor(4), tensor(6))
    assert linear.weight.tolist() == [[1], [-2]]
    assert linear.bias.tolist() == [1.5, 0]  # (3 + 10 - 4) / 6 and (-6 + 10 - 4) / 6


@pytest.mark.parametrize("mean_over_std", [1e5, 1e7])
def test_rescale_head_is_exact_where_the_mean_is_large(mean_over_std):
    """Van Hasselt et al. 2016, eq. 5, 50 times: what a head says stays to 1e-5 of the std, not of
    the value: in float32 a mean of 1e7 std has no digit left below 1 std."""
    linear, x = nn.Linear(6, 5), torch.randn(50, 6)
    mean, std = tensor(mean_over_std), tensor(1.0)
    for i in range(50):
        before = std * linear(x).detach().double() + mean
        new_mean, new_std = mean + 0.3 * std * (-1) ** (i // 3), std * (1.07, 0.95)[i % 2]
        rescale_head(linear, mean, std, new_mean, new_std)
        mean, std = new_mean, new_std
        after = std * linear(x).detach().double() + mean
        assert (after - before).abs().max() < 1e-5 * std


SCALES = [  # old mean, old std, new mean, new std
    (0, 1, 1e4, 1e3),
    (1e4, 1e3, -300, 20),
    (1e4, 1e3, 1.2e4, 5e3),
    (-2, 0.5, 0.1, 1e-2),
    (20, 1e-4, 20.5, 0.3),
    (0.3, 2, 0.3, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", SCALES)
def test_rescale_head_keeps_decoded_values(scales, dtype):
    """Van Hasselt et al. 2016, eq. 5: std * output + mean stays to 1e-5 of max(1, std, |value|)."""
    linear = nn.Linear(6, 5, dtype=dtype)
    x = torch.randn(50, 6, dtype=dtype)
    old_mean, old_std, new_mean, new_std = stats = [tensor(s) for s in scales]
    before = old_std * linear(x).detach().double() + old_mean
    rescale_head(linear, *stats)
    after = new_std * linear(x).detach().double() + new_mean
    largest = max(1, scales[1], scales[3])
    bound = 1e-5 * before.abs().clamp(min=largest)
    assert ((after - before).abs() <= bound).all()
    assert linear.weight.dtype == linear.bias.dtype == dtype
    assert [float(s) for s in stats] == list(scales)


def test_rescale_head_follows_the_running_moments():
    """Van Hasselt et al. 2016, eq. 5: old and new statistics decode to the same values."""
    linear, x = nn.Linear(4, 3), torch.randn(20, 4)
    moments = RunningMoments()
    moments.update(30 * torch.randn(40) + 5)
    for scale in (100, 1, 1000):
        old = copy.deepcopy(moments)
        before = old.denormalize(linear(x).detach())
        moments.update(scale * torch.randn(64) - 3 * scale)
        rescale_head(linear, old.mean, old.std, moments.mean, moments.std)
        after = moments.denormalize(linear(x).detach())
        largest = max(1, float(old.std), float(moments.std))
        bound = 1e-5 * before.abs().clamp(min=largest)
        assert ((after - before).abs() <= bound).all()


def test_rescale_head_changes_the_layer_in_place():
    """Van Hasselt et al. 2016, eq. 5, in place: the optimizer keeps its parameters, as leaves."""
    linear = nn.Linear(3, 2)
    parameters = list(linear.parameters())
    before = [p.detach().clone() for p in parameters]
    rescale_head(linear, tensor(1), tensor(2), tensor(3), tensor(5))
    for p, q, old in zip(linear.parameters(), parameters, before):
        assert p is q
        assert p.is_leaf
        assert p.requires_grad
        assert not p.equal(old)


@pytest.mark.parametrize(("times", "at_floor"), [(99, True), (101, False)])
def test_a_std_within_a_hundred_times_its_least_value_is_at_the_floor(script, times, at_floor):
    """Ours: the least variance is (1e-7 of the mean)^2, so of a mean of 7 the least std is 7e-7."""
    moments = script.RunningMoments()
    moments.merge(tensor(7.0), tensor((times * 7e-7) ** 2), weight=1)
    assert moments.at_floor == at_floor
