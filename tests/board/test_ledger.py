"""The ledger's arithmetic, on a clock that the test moves."""

import time

import numpy as np
import pytest
from kvgate import contract as c
from kvgate.board import ledger

CONTRACT = c.Contract(
    "s", "decode", "plain", "", 5, 4, c.Cache(8), (), (), (),
    (c.Tensor("embedding", c.EMBEDDING, (1, 1, 4)), c.Tensor("slot", c.SLOT, (1,), "int64")),
    (c.Tensor("logits", c.LOGITS, (1, 1, 5)),), "",
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def pass_us(self, microseconds: float) -> None:
        self.now += int(microseconds * 1000)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock.now)
    return clock


class Machine:
    """A host half and an engine whose parts take the given times: 10 us, 100 us a step number, 20 us."""

    length = 3

    def __init__(self, clock: Clock, own: bool = True) -> None:
        self.clock, self.steps = clock, 0
        if own:
            self.last_us = lambda: {"run_us": 70.0 * self.steps}

    def feeds(self, tokens):
        self.clock.pass_us(10)
        return {}

    def step(self, feeds):
        self.steps += 1
        self.clock.pass_us(100 * self.steps)
        return {}

    def take(self, outputs, valid):
        self.clock.pass_us(20)


def run(machine, steps, **hooks):
    timed = ledger.Timed(machine, machine, **hooks)
    for _ in range(steps):
        timed.take(timed.step(timed.feeds([1])))
        machine.clock.pass_us(1e6)  # between steps: nobody's time
    return timed


def test_medians_after_the_warm_up(clock):
    found = ledger.summary(run(Machine(clock), 7), CONTRACT, warmup=2)
    assert found["steps"] == 5 and found["warmup"] == 2
    assert (found["inputs_us"], found["inference_us"], found["cache_us"]) == (10.0, 500.0, 20.0)
    assert (found["total_us"], found["total_p10_us"], found["total_p90_us"]) == (530.0, 370.0, 690.0)
    assert found["run_us"] == 350.0 and found["overhead_us"] == 150.0
    assert found["tokens_per_second"] == round(1e6 / 530, 3)
    assert found["bytes_in"] == 4 * 4 + 8 and found["bytes_out"] == 5 * 4


def test_no_residue_without_the_runtime_s_own_time(clock):
    found = ledger.summary(run(Machine(clock, own=False), 4), CONTRACT, 1)
    assert found["run_us"] is found["overhead_us"] is None


def test_no_residue_where_some_steps_have_no_time(clock):
    machine = Machine(clock)
    machine.last_us = lambda: {"run_us": None if machine.steps == 3 else 1.0}
    assert ledger.summary(run(machine, 4), CONTRACT, 1)["run_us"] is None


def test_hooks_are_nobody_s_time(clock):
    hooks = {"before": lambda: clock.pass_us(5000), "after": lambda: clock.pass_us(7000)}
    assert ledger.summary(run(Machine(clock), 3, **hooks), CONTRACT, 0)["total_us"] == 230.0


def test_nothing_measured_is_an_error(clock):
    with pytest.raises(ValueError, match="got 2 steps, allowed: more than warmup 2"):
        ledger.summary(run(Machine(clock), 2), CONTRACT, 2)


def test_an_inference_that_failed_is_no_step(clock):
    machine = Machine(clock)
    timed = run(machine, 2)
    timed.feeds([1])
    assert len(timed.totals()) == 2


def test_first_token_is_the_whole_prompt(clock):
    timed = run(Machine(clock), 9)  # 2 isolated, then forced: 130 + 100 us a step number
    assert ledger.first_token(timed, 2, 3) == sum(30 + 100 * n for n in (3, 4, 5))
    assert ledger.first_token(timed, 2, 8) is None
    timed.clear()
    assert ledger.first_token(timed, 0, 1) is None


def test_the_host_half_is_reached_through_it(clock):
    assert run(Machine(clock), 1).length == 3


def test_layers_or_why_not():
    assert ledger.layers(None, "not asked for") == {
        "npu_us": None,
        "cpu_us": None,
        "source": None,
        "why": "not asked for",
        "operators": None,
    }
    found = ledger.layers({"npu_us": 5.0, "cpu_us": 1.0, "source": "table", "operators": []}, "unused")
    assert found["npu_us"] == 5.0 and found["source"] == "table" and found["why"] is None


def test_peak_memory_is_this_program_s_own(tmp_path):
    (tmp_path / "status").write_text("Name:\tx\nVmPeak:\t 900 kB\nVmHWM:\t  300 kB\n")
    assert ledger.peak_rss(tmp_path / "status") == 300 * 1024
    assert ledger.peak_rss(tmp_path / "nothing") is None
    block = np.ones(30_000_000, np.uint8)
    assert (ledger.peak_rss() or 0) > block.nbytes
