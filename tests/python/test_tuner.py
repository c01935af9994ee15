"""choose() and the tuner through the compiled module, with invented devices and timers."""

import fcntl
import math
import threading

import pytest
from gnsilu import _C

DEVICE = _C.Device(
    name="NVIDIA Invented",
    sm_count=132,
    capability_major=9,
    capability_minor=0,
    driver_version=13000,
)
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
    plan = _C.choose(problem(), DEVICE)
    assert plan.route == THREE_PASS
    assert plan.config == CANDIDATES[0]
    assert plan.spans.count == _C.spans_of(8 * 2**20).count
    assert plan.workspace_bytes > 0
    assert plan.tunable
    assert "three_pass" in repr(plan)


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


@pytest.mark.parametrize("time", [None, math.nan, math.inf, 0.0, -1.0])
def test_candidates_without_a_usable_time_are_passed_over(time, tmp_path, warnings):
    tuner = _C.Tuner(tmp_path, warnings.append)
    good = CANDIDATES[3]
    assert tuner.tune(key(8), lambda config: 5.0 if config == good else time) == good
    assert tuner.tune(key(4), lambda config: time) == CANDIDATES[0]
    stored = _C.read_tuner_file(_C.tuner_file_path(tmp_path, DEVICE.name)).entries
    assert [entry.key for entry in stored] == [key(8)]
    assert warnings == []


def test_an_exception_of_the_timer_comes_back_as_it_is(tmp_path, warnings):
    class StickyError(Exception):
        pass

    def raising(config):
        raise StickyError(config.threads)

    tuner = _C.Tuner(tmp_path, warnings.append)
    with pytest.raises(StickyError):
        tuner.tune(key(), raising)
    assert tuner.find(key()) is None
    assert tuner.tune(key(), last_is_fastest) == CANDIDATES[-1]


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
        thread.join()
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
        thread.join()
    assert warnings == []
    assert len(_C.read_tuner_file(path).entries) == 1
