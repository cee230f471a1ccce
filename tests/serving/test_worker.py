"""The thread that owns the context: order, limits, ends and errors."""

import threading

import pytest
from kvgate.serving.worker import Full, Worker
from served import wait_for


class Opened:
    """A context that knows who used it."""

    def __init__(self):
        self.threads, self.closed = [threading.get_ident()], False

    def use(self):
        self.threads.append(threading.get_ident())

    def close(self):
        self.use()
        self.closed = True


@pytest.fixture
def worker():
    made = Worker(Opened, 2)
    made.start()
    yield made
    assert made.stop(20)


def taken(job):
    return [x for x in job.pieces(5) if x is not None]


def held(gate, name, done):
    """Work that begins when the gate opens."""

    def work(context, stopped):
        context.use()
        assert gate.wait(20)
        done.append(name)
        yield name

    return work


def test_one_thread_opens_steps_and_closes(worker):
    for _ in range(3):
        job = worker.submit(lambda context, stopped: [context.use()])
        assert taken(job) == []
    assert worker.stop(20) and worker.context.closed
    assert len(worker.context.threads) == 5 and len(set(worker.context.threads)) == 1
    assert threading.get_ident() not in worker.context.threads


def test_jobs_are_done_in_order_and_one_too_many_is_refused(worker):
    gate, done = threading.Event(), []
    jobs = [worker.submit(held(gate, n, done)) for n in range(3)]
    with pytest.raises(Full):
        worker.submit(held(gate, 3, done))
    assert worker.length == 3
    gate.set()
    assert [taken(x) for x in jobs] == [[0], [1], [2]] and done == [0, 1, 2]
    wait_for(lambda: worker.length == 0)


def test_a_cancelled_job_leaves_the_line_and_never_runs(worker):
    gate, done = threading.Event(), []
    first, second, third = (worker.submit(held(gate, n, done)) for n in range(3))
    worker.cancel(second)
    assert worker.length == 2 and second.ended is not None and first.ended is None
    gate.set()
    assert taken(third) == [2] and done == [0, 2]


def test_a_running_job_that_is_cancelled_ends_before_its_next_step(worker):
    def work(context, stopped):
        n = 0
        while not stopped():
            yield (n := n + 1)

    job = worker.submit(work)
    pieces = job.pieces(5)
    assert [next(pieces), next(pieces)] == [1, 2]
    worker.cancel(job)
    assert list(pieces)[:1] == [3]
    assert taken(worker.submit(lambda context, stopped: ["next"])) == ["next"]


def test_silence_is_told(worker):
    gate = threading.Event()
    pieces = worker.submit(held(gate, "late", [])).pieces(0.01)
    assert [next(pieces), next(pieces)] == [None, None]
    gate.set()
    assert [x for x in pieces if x] == ["late"]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), MemoryError()])
def test_an_error_reaches_who_asked_and_the_thread_goes_on(worker, error):
    def work(context, stopped):
        yield 1
        raise error

    pieces = worker.submit(work).pieces(5)
    assert next(pieces) == 1
    with pytest.raises(type(error)):
        next(pieces)
    assert taken(worker.submit(lambda context, stopped: [2])) == [2]


@pytest.mark.parametrize("error", [OSError("cannot open"), SystemExit("bye"), AttributeError("x")])
def test_what_opening_raises_is_raised_where_it_was_started(error):
    def fails():
        raise error

    worker = Worker(fails, 1)
    with pytest.raises(type(error)):
        worker.start()
    assert worker.stop(20)


def test_the_end_ends_what_waits_and_what_comes(worker):
    gate, done = threading.Event(), []
    running, waiting = worker.submit(held(gate, 0, done)), worker.submit(held(gate, 1, done))
    wait_for(lambda: len(worker.context.threads) == 2)
    worker.stopping.set()
    gate.set()
    assert taken(running) == [0] and taken(waiting) == []
    assert worker.stop(20) and worker.context.closed
    assert taken(worker.submit(held(gate, 2, done))) == [] and done == [0]


def test_a_step_that_hangs_does_not_hold_the_end_up(worker):
    gate = threading.Event()
    worker.submit(held(gate, 0, []))
    wait_for(lambda: len(worker.context.threads) == 2)
    assert not worker.stop(0.05) and not worker.context.closed
    gate.set()
    assert worker.stop(20) and worker.context.closed
