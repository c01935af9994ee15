"""choose() and the tuner through the compiled module, with invented devices and timers."""

import fcntl
import math
import threading
import time

import pytest
from gnsilu import _C
from hypothesis import given, settings
from hypothesis import strategies as st


def device(sm_count=132, capability=(9, 0)):
    major, minor = capability
    return _C.Device(
        name="NVIDIA Invented",
        sm_count=sm_count,
        capability_major=major,
        capability_minor=minor,
        driver_version=13000,
        shared_memory_per_block=232448 if major >= 9 else 65536,
    )


DEVICE = device()
THREE_PASS = _C.Route.three_pass
CANDIDATES = _C.candidates(THREE_PASS)


def problem(**changes):
    facts = {"samples": 1, "channels": 256, "spatial_size": 2**20, "num_groups": 32}
    return _C.Problem(**{**facts, "on_cuda": True, **changes})


def key(channels_per_group=8):
    return _C.tuner_key(problem(channels=32 * channels_per_group), DEVICE, THREE_PASS)


def last_is_fastest(config):
    return 1.0 if config == CANDIDATES[-1] else 2.0


@pytest.fixture
def warnings():
    return []


def test_choose_gives_the_plan():
    plan = _C.choose(problem(), DEVICE, _C.Route.two_pass)
    assert plan.route == _C.Route.two_pass
    assert plan.config == CANDIDATES[0]
    assert plan.spans.count == _C.spans_of(8 * 2**20).count
    assert plan.workspace_bytes > 0
    assert plan.tunable
    assert "two_pass" in repr(plan)


def test_choose_refuses_a_forced_route_with_the_reason():
    with pytest.raises(ValueError, match=r"three_pass.*CUDA"):
        _C.choose(problem(on_cuda=False), DEVICE, THREE_PASS)
    assert _C.choose(problem(), DEVICE, forced=_C.Route.fallback).route == _C.Route.fallback


@pytest.mark.parametrize(
    "changes", [{"num_groups": 0}, {"num_groups": -1}, {"num_groups": 7}, {"samples": -1}]
)
def test_a_problem_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        problem(**changes)


@pytest.mark.parametrize("size", [-1, 2**63 - 1])
def test_spans_of_refuses_what_no_group_has(size):
    with pytest.raises(ValueError, match="group_size"):
        _C.spans_of(size)


def test_configurations_compare_by_value():
    one = _C.Config(threads=128, vectors_in_flight=4)
    same = _C.Config(threads=128, vectors_in_flight=4)
    assert one == same
    assert hash(one) == hash(same)
    assert one != _C.Config(threads=128, vectors_in_flight=8)
    assert one != 128
    assert repr(one) == "Config(threads=128, vectors_in_flight=4)"
    assert _C.Config() == CANDIDATES[0]


def test_route_names():
    for route in _C.Route.__members__.values():
        assert _C.route_from_name(route.name) == route
    assert _C.route_from_name("auto") is None
    assert _C.candidates(_C.Route.fallback) == []


def test_the_key_leaves_out_lengths_and_resolutions():
    assert _C.tuner_key(problem(samples=7, spatial_size=9), DEVICE, THREE_PASS) == key()
    assert key(8) != key(4)
    assert (key().gpu, key().sm_count, key().driver_version) == ("NVIDIA Invented", 132, 13000)
    assert key().kernels == _C.kernel_version


def test_the_fastest_is_remembered(tmp_path, warnings):
    tuner = _C.Tuner(tmp_path, warnings.append)
    assert tuner.find(key()) is None
    assert tuner.tune(key(), last_is_fastest) == CANDIDATES[-1]
    assert tuner.find(key()) == CANDIDATES[-1]

    def not_called(config):
        raise AssertionError(f"{config} was timed again")

    assert _C.Tuner(tmp_path, warnings.append).tune(key(), not_called) == CANDIDATES[-1]
    assert warnings == []


# --- Bad candidates ---------------------------------------------------------------------------

NO_TIME = [None, math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0]


@pytest.mark.parametrize("bad", NO_TIME)
@pytest.mark.parametrize("good", range(len(CANDIDATES)))
def test_case_50_candidates_without_a_usable_time_are_passed_over(good, bad, tmp_path, warnings):
    tuner = _C.Tuner(tmp_path, warnings.append)
    fastest = CANDIDATES[good]
    assert tuner.tune(key(), lambda config: 5.0 if config == fastest else bad) == fastest
    assert tuner.find(key()) == fastest
    assert _C.Tuner(tmp_path, warnings.append).find(key()) == fastest
    assert warnings == []


@pytest.mark.parametrize("bad", NO_TIME)
def test_case_50_all_candidates_without_a_usable_time(bad, tmp_path, warnings):
    """The default, timed once in this process; the next one may have more luck."""
    tuner = _C.Tuner(tmp_path, warnings.append)
    timed = []
    for _ in range(2):
        assert tuner.tune(key(), lambda config: timed.append(config) or bad) == CANDIDATES[0]
    assert timed == CANDIDATES
    assert list(tmp_path.iterdir()) == []
    assert _C.Tuner(tmp_path, warnings.append).tune(key(), last_is_fastest) == CANDIDATES[-1]
    assert warnings == []


@pytest.mark.parametrize("raising", range(len(CANDIDATES)))
def test_case_50_an_exception_of_the_timer_comes_back_as_it_is(raising, tmp_path, warnings):
    """It stands for an error of the device, which stays: no candidate after it is begun."""

    class StickyError(Exception):
        pass

    timed = []

    def timer(config):
        timed.append(config)
        if config == CANDIDATES[raising]:
            raise StickyError(config.threads)
        return 1.0

    tuner = _C.Tuner(tmp_path, warnings.append)
    with pytest.raises(StickyError):
        tuner.tune(key(), timer)
    assert timed == CANDIDATES[: raising + 1]
    assert tuner.find(key()) is None
    assert list(tmp_path.iterdir()) == []
    assert tuner.tune(key(), last_is_fastest) == CANDIDATES[-1]


@pytest.mark.parametrize("slow", range(len(CANDIDATES)))
def test_case_50_no_candidate_is_begun_once_the_budget_is_spent(slow, tmp_path, warnings):
    """One that hangs cannot be stopped; one that returns, however late, is the last."""
    tuner = _C.Tuner(tmp_path, warnings.append)
    timed = []

    def timer(config):
        timed.append(config)
        if config == CANDIDATES[slow]:
            time.sleep(0.06)
        return 1000.0 - len(timed)

    assert tuner.tune(key(), timer, budget_seconds=0.05) == timed[-1]
    # Fewer on a machine that is so busy that the quick ones take the whole budget.
    assert timed == CANDIDATES[: len(timed)]
    assert 1 <= len(timed) <= slow + 1
    assert tuner.find(key()) == timed[-1]


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan])
def test_case_50_no_time_at_all(budget, tmp_path, warnings):
    tuner = _C.Tuner(tmp_path, warnings.append)
    assert tuner.tune(key(), pytest.fail, budget_seconds=budget) == CANDIDATES[0]
    assert list(tmp_path.iterdir()) == []


SIZES = st.sampled_from([1, 2, 3, 7, 8, 31, 33, 49, 127, 4096, 4097, 65537, 2**20, 2**24 + 1])


@settings(deadline=None)
@given(
    samples=st.sampled_from([1, 2, 3, 33, 65537]),
    num_groups=st.sampled_from([1, 2, 3, 32, 70000]),
    channels_per_group=st.integers(1, 40),
    spatial_size=SIZES,
)
def test_case_50_no_grid_of_0_on_1_to_188_multiprocessors(
    samples, num_groups, channels_per_group, spatial_size
):
    """The kernels count their blocks by groups and spans: none of them may be 0 on any GPU."""
    asked = problem(
        samples=samples,
        channels=num_groups * channels_per_group,
        num_groups=num_groups,
        spatial_size=spatial_size,
    )
    group = channels_per_group * spatial_size
    for sm_count in range(1, 189):
        for capability in ((7, 5), (9, 0), (12, 0)):
            plan = _C.choose(asked, device(sm_count, capability))
            spans = plan.spans
            assert plan.route != _C.Route.fallback
            assert plan.blocks <= (sm_count if plan.route == _C.Route.ring else spans.count)
            assert 1 <= plan.groups_per_launch <= samples * num_groups
            assert (spans.count - 1) * spans.size < group <= spans.count * spans.size
            assert 0 <= plan.workspace_bytes <= 1 << 20
            assert plan.config in _C.candidates(plan.route)


def test_case_50_every_candidate_has_whole_warps():
    for config in CANDIDATES:
        assert 32 <= config.threads <= 1024
        assert config.threads % 32 == 0
        assert config.vectors_in_flight >= 1


# --- Memory, threads --------------------------------------------------------------------------


def test_memory_only(warnings):
    tuner = _C.Tuner(None, warnings.append)
    assert tuner.tune(key(), last_is_fastest) == CANDIDATES[-1]
    assert tuner.find(key()) == CANDIDATES[-1]
    tuner.clear()
    assert tuner.find(key()) is None
    assert warnings == []


def test_a_warning_that_raises_leaves_the_tuner_whole(tmp_path):
    path = _C.tuner_file_path(tmp_path, DEVICE.name)
    path.write_text("[]")

    def raising(message):
        raise UserWarning(message)

    tuner = _C.Tuner(tmp_path, raising)
    with pytest.raises(UserWarning, match="tuner-NVIDIA_Invented"):
        tuner.find(key())
    assert tuner.tune(key(), last_is_fastest) == CANDIDATES[-1]
    assert _C.read_tuner_file(path).fault == ""


def test_threads_tune_different_keys_at_once(tmp_path, warnings):
    """Both timers have to be inside their tune() for the barrier to open."""
    tuner = _C.Tuner(tmp_path, warnings.append)
    barrier = threading.Barrier(2, timeout=30)
    found = {}

    def tune(channels_per_group):
        def timer(config):
            barrier.wait()
            return last_is_fastest(config)

        found[channels_per_group] = tuner.tune(key(channels_per_group), timer, budget_seconds=600)

    threads = [threading.Thread(target=tune, args=(n,)) for n in (4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {4: CANDIDATES[-1], 8: CANDIDATES[-1]}
    assert warnings == []


def test_other_threads_run_while_the_tuner_waits_for_the_file(tmp_path, warnings):
    """The lock is given back by another Python thread: needs the interpreter lock to be free."""
    path = _C.tuner_file_path(tmp_path, DEVICE.name)
    tuner = _C.Tuner(tmp_path, warnings.append)
    timed = threading.Event()

    def timer(config):
        timed.set()
        return last_is_fastest(config)

    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=tuner.tune, args=(key(), timer))
        thread.start()
        assert timed.wait(30)
        assert not path.exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join(30)
    assert warnings == []
    assert len(_C.read_tuner_file(path).entries) == 1
