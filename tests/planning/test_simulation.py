"""The simulated server, compared with queues of known laws and with the real scheduler."""

import dataclasses

import numpy as np
import pytest

from speccascade_jax.core.errors import FieldError
from speccascade_jax.planning.simulation import (
    Loop,
    SimulatedServer,
    Simulation,
    closed_loop_rate,
    fewest,
    fitted,
    in_closed_loop,
    poisson_arrivals,
    random_pauses,
    rounds_of_texts,
    simulate,
)


def texts(count, rounds):
    return np.full(count, 5 * rounds), np.full(count, rounds)


def at_random(server, tokens, rounds, requests_per_second):
    return simulate(server, poisson_arrivals(requests_per_second, len(tokens)), tokens, rounds)


def test_random_arrivals_are_a_poisson_process():
    """In each of 20,000 intervals a number of requests whose mean and variance are both rate times length."""
    arrivals = poisson_arrivals(50.0, 100_000, seed=3)
    counts = np.bincount((arrivals / 0.1).astype(int), minlength=20_000)[:19_000]
    assert counts.mean() == pytest.approx(5, rel=0.02) and counts.var() == pytest.approx(5, rel=0.05)
    assert (np.diff(arrivals) >= 0).all() and not np.array_equal(arrivals, poisson_arrivals(50.0, 100_000))


def test_requests_are_answered_from_when_they_arrive():
    """Two come together, which one row serves in turn; the third finds the row idle."""
    server = SimulatedServer(1, 0.01, 0.005, queue=9, rounds=1)
    served = simulate(server, np.array([0.1, 0.1, 9.0]), *texts(3, 4))
    np.testing.assert_allclose(served.whole, [0.045, 0.09, 0.045])
    assert served.seconds == pytest.approx(8.945)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_row_is_a_queue_of_constant_service(load):
    """The mean wait of M/D/1 is load / (2 (1 - load)) services (Pollaczek and Khinchine)."""
    service = 60 * 0.01 + 0.005
    server = SimulatedServer(1, 0.01, 0.005, queue=10**6, rounds=1)
    served = at_random(server, *texts(3000, 60), load / service)
    wait = served.whole.mean() - service
    assert wait == pytest.approx(load / (2 * (1 - load)) * service, rel=0.15)


def test_without_a_queue_requests_are_lost_by_erlangs_formula():
    """One row, no queue: a share load / (1 + load) is refused."""
    server = SimulatedServer(1, 0.01, 0.0, queue=0, rounds=1)
    served = at_random(server, *texts(3000, 60), 1.0 / (60 * 0.01))
    assert served.refused / 3000 == pytest.approx(0.5, abs=0.03)
    assert np.isnan(served.first).sum() == served.refused


def test_a_refused_request_takes_as_long_to_parse_as_an_accepted_one():
    """While the first occupies the only row, four more arrive; the sixth is accepted."""
    server = SimulatedServer(1, 1.0, 0.0, queue=0, rounds=1, request_seconds=0.125)
    served = simulate(server, np.array([0.0, 0.5, 0.5, 0.5, 0.5, 2.0]), *texts(6, 1))
    assert served.refused == 4
    assert served.whole[0] == 1 + 5 * 0.125 and served.seconds == 2.0 + 1.125


def test_requests_that_share_rounds_cost_no_more_than_one():
    """Far below its load, a request with rows to spare waits at most for the round that runs."""
    server = SimulatedServer(64, 0.01, 0.0, queue=10, rounds=1)
    served = at_random(server, *texts(2000, 7), 50.0)
    assert not served.refused
    assert (served.first > 0.01 - 1e-9).all() and (served.first < 0.02 + 1e-9).all()
    assert (served.whole < 0.08 + 1e-9).all()


def test_a_saturated_server_writes_what_its_rounds_write():
    server = SimulatedServer(8, 0.01, 0.002, queue=100)
    served = at_random(server, *texts(3000, 6), 10_000.0)
    # Eight texts of 30 tokens take six rounds and eight prompts; some rows idle until others are free.
    full = 8 * 30 / (6 * 0.01 + 8 * 0.002)
    assert 0.9 * full < served.tokens_per_second <= full * 1.001
    assert served.busy > 0.95 and served.refused > 2000


def test_prompts_are_read_together_while_enough_wait():
    """Four at once if four wait, each for a quarter of the time; what HTTP takes is added to each."""
    server = SimulatedServer(8, 0.01, 0.008, 3000, together_seconds=0.002, request_seconds=0.001)
    served = at_random(server, *texts(3000, 6), 10_000.0)
    full = 8 * 30 / (6 * 0.01 + 8 * 0.003)
    assert 0.9 * full < served.tokens_per_second <= full * 1.001
    alone = at_random(server, *texts(200, 6), 0.01)
    np.testing.assert_allclose(alone.first, 0.008 + 0.001 + 0.01)
    np.testing.assert_allclose(alone.whole, 0.008 + 0.001 + 6 * 0.01)


def test_prompts_of_one_width_are_read_together():
    """Eight requests wait for four rows after a short one: narrow ones pass the wide ones between them."""
    server = SimulatedServer(4, 1.0, 0.1, queue=100, rounds=1)
    widths, rounds = np.array([0, *[0, 1] * 4]), np.array([1, *[8, 16] * 4])
    first = simulate(server, 1e-9 * np.arange(9), rounds, rounds, widths).first
    assert first[5] == pytest.approx(first[7]) and first[6] > first[5] + 3
    first = simulate(server, 1e-9 * np.arange(9), rounds, rounds).first
    assert first[5] == pytest.approx(first[6]) and first[7] > first[5] + 3


def test_the_client_of_a_closed_loop_has_the_server_to_itself():
    server = SimulatedServer(8, 0.01, 0.008, 100, request_seconds=0.001, step_seconds=0.002)
    _, rounds = texts(100, 6)
    alone = 0.008 + 0.001 + 6 * (0.01 + 0.002)
    assert in_closed_loop(server, rounds, 1, np.zeros(100, int)) == pytest.approx(1 / alone)
    assert in_closed_loop(server, rounds, 1, np.zeros(100, int), 0.5) == pytest.approx(1 / (alone + 0.5))


def test_clients_that_pause_at_random_get_what_the_server_answers_meanwhile():
    """Their rate by Little's law is the number of answers over the time between them."""
    server = SimulatedServer(8, 0.01, 0.004, 100, 2, together_seconds=0.002, request_seconds=0.001)
    rounds, widths = np.random.default_rng(0).integers(1, 6, 4000), np.zeros(4000, int)
    for clients, pause in ((8, 0.2), (32, 0.1)):
        pauses = random_pauses(len(rounds), pause)
        simulation = Simulation(server, pauses[:clients], rounds, widths, pauses)
        simulation.run()
        ends = np.sort(simulation.whole)[clients:-clients]
        counted = (len(ends) - 1) / (ends[-1] - ends[0])
        assert in_closed_loop(server, rounds, clients, widths, pause) == pytest.approx(counted, rel=0.01)


def test_rows_that_become_free_do_not_wait_for_the_end_of_a_step():
    """As many clients as rows in the queue keep the server nearly as busy as a long queue."""
    server = SimulatedServer(8, 0.01, 0.004, 100, 2, together_seconds=0.002)
    rounds, widths = np.random.default_rng(0).integers(1, 6, 2000), np.zeros(2000, int)
    few, many = (in_closed_loop(server, rounds, clients, widths) for clients in (16, 70))
    assert few > 0.9 * many


def test_the_rate_of_a_closed_loop_is_that_of_its_steady_state():
    """The answers at its beginning and end, which wait less, do not make a short loop look faster."""
    assert closed_loop_rate(np.array([9.0, 9, 1, 1, 1, 0.5, 0.5]), 2) == 2
    assert closed_loop_rate(np.array([2.0, 4]), 1) == closed_loop_rate(np.array([2.0, 4]), 2) / 2 == 1 / 3
    server = SimulatedServer(8, 0.008, 0.004, 64, 2, 0.002, request_seconds=0.002, step_seconds=0.003)
    rounds = np.random.default_rng(0).integers(1, 7, 400)
    short, long = (
        in_closed_loop(server, each, 32, np.zeros(len(each), int)) for each in (rounds, np.tile(rounds, 10))
    )
    assert short == pytest.approx(long, rel=0.01)


def test_what_requests_and_steps_cost_is_found_from_closed_loops():
    """Those of a server that is itself simulated, from a long queue and from none."""
    known = SimulatedServer(8, 0.01, 0.008, 64, 2, 0.002, request_seconds=0.0015, step_seconds=0.003)
    rounds, widths = np.random.default_rng(0).integers(1, 6, 400), np.zeros(400, int)
    measured = {
        name: Loop(clients, pause, in_closed_loop(known, rounds, clients, widths, pause))
        for name, clients, pause in (("request_seconds", 32, 0.1), ("step_seconds", 8, 0.0))
    }
    blank = dataclasses.replace(known, request_seconds=0.0, step_seconds=0.0)
    server = fitted(blank, rounds, measured, widths)
    assert server.request_seconds == pytest.approx(0.0015, rel=0.1)
    assert server.step_seconds == pytest.approx(0.003, rel=0.1)
    faster = {name: loop._replace(rate=2 * loop.rate) for name, loop in measured.items()}
    assert fitted(blank, rounds, faster, widths) == blank  # nothing costs less than nothing


def test_averaged_servers_have_the_mean_costs_and_nothing_else_changes():
    calm = SimulatedServer(8, 1.0, 2.0, 64, 2, None, request_seconds=3.0, step_seconds=4.0)
    busy = SimulatedServer(8, 3.0, 4.0, 64, 2, None, request_seconds=5.0, step_seconds=6.0)
    assert calm.averaged(busy) == SimulatedServer(8, 2.0, 3.0, 64, 2, None, 4.0, 5.0)
    assert calm.averaged(busy) == busy.averaged(calm)


def test_rounds_of_a_text_are_a_renewal_process():
    emitted = np.array([0.0, 0.5, 0.3, 0.2])
    rounds = rounds_of_texts(emitted, np.full(20_000, 200), seed=1)
    mean, variance = 1.7, 0.5 + 0.3 * 4 + 0.2 * 9 - 1.7**2
    # E[N(n)] = n / m + (s^2 + m^2) / (2 m^2) - 1/2 + (lattice) 1 / (2 m), up to terms that vanish.
    expected = 200 / mean + (variance + mean**2) / (2 * mean**2) - 0.5 + 0.5 / mean - 0.5
    assert rounds.mean() == pytest.approx(expected, abs=0.5)
    assert (rounds_of_texts(np.array([0.0, 1.0]), np.arange(1, 9)) == np.arange(1, 9)).all()


def test_the_fewest_servers_keep_the_promise_and_one_fewer_does_not():
    server, rate = SimulatedServer(4, 0.01, 0.002, queue=50), 400.0
    tokens, rounds = texts(4000, 10)
    fleet = fewest(server, tokens, rounds, rate, 0.05)
    assert fleet is not None and fleet.servers > 1
    assert np.percentile(fleet.served.first, 99) <= 0.05 and not fleet.served.refused
    fewer = at_random(server, tokens, rounds, rate / (fleet.servers - 1))
    assert fewer.refused or np.percentile(fewer.first, 99) > 0.05
    assert fewest(server, tokens, rounds, rate, 0.001, most_servers=64) is None  # below a prompt and a round


def test_a_queue_that_only_begins_to_grow_is_no_plan():
    """Slightly more load than one server can handle: few requests wait before the simulation ends."""
    server, (tokens, rounds) = SimulatedServer(4, 0.01, 0.002, queue=10_000), texts(500, 10)
    rate = 1.02 / (10 * 0.01 / 4 + 0.002)
    assert server.load(rounds, rate) == pytest.approx(1.02)
    assert np.percentile(at_random(server, tokens, rounds, rate).first, 99) < 10
    fleet = fewest(server, tokens, rounds, rate, 10.0)
    assert fleet is not None and fleet.servers == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0),
        ("queue", -1),
        ("rounds", 0),
        ("round_seconds", 0.0),
        ("prompt_seconds", -1.0),
        ("together_seconds", -1.0),
        ("request_seconds", -1.0),
        ("step_seconds", -1.0),
    ],
)
def test_an_invalid_server_is_refused(field, value):
    with pytest.raises(FieldError) as refused:
        SimulatedServer(**{"rows": 1, "round_seconds": 1.0, "prompt_seconds": 0.0, "queue": 1, field: value})
    assert (refused.value.field, refused.value.value) == (field, value)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("rounds", ([0.0], [1], [0])),
        ("rounds", ([0.0], [1], [1, 1])),
        ("arrivals", ([0.0, 1.0], [1], [1])),
        ("arrivals", ([2.0, 1.0], [1, 1], [1, 1])),
        ("arrivals", ([-1.0], [1], [1])),
        ("arrivals", ([np.inf], [1], [1])),
        ("widths", ([0.0], [1], [1], [1, 1])),
    ],
)
def test_invalid_requests_are_refused(field, arguments):
    with pytest.raises(FieldError) as refused:
        simulate(SimulatedServer(1, 1.0, 0.0, 1), *map(np.array, arguments))
    assert refused.value.field == field


@pytest.mark.parametrize("rate", [0.0, -1.0, np.inf, np.nan])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(FieldError) as refused:
        poisson_arrivals(rate, 1)
    assert refused.value.field == "requests_per_second"
