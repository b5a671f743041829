"""Schedulers run to their ends, and what they call."""

from toys import Digits

from speccascade_jax.scheduling.scheduler import Scheduler


class Letters(Digits):
    """A tokenizer of the tiny models' tokens: each is a letter."""

    def __init__(self):
        self.pad_id, self.eos_id, self.bos_id, self.size = 0, 1, -1, 97

    def decode(self, tokens):
        return "".join(chr(200 + token) for token in tokens)

    def id_of(self, piece):
        return None


def run(scheduler, requests, rounds=None):
    """The result of each request, by its place in the list."""
    ids, results = scheduler.admit(requests), {}
    while scheduler.busy:
        scheduler.run(rounds)
        for number, result in scheduler.finished():
            assert number not in results
            results[number] = result
    return [results[number] for number in ids]


def alone(programs, requests, bucket):
    """Each request's result where it has a batch of its own."""
    return [run(Scheduler(programs, 1, Letters(), bucket), [request])[0] for request in requests]


def calls(programs, monkeypatch):
    """The names of the programs that run, as they do."""
    named, real = [], programs.call

    def call(program, *rest):
        named.append(next(key[0] for key, executable in programs.compiled.items() if executable is program))
        return real(program, *rest)

    monkeypatch.setattr(programs, "call", call)
    return named
