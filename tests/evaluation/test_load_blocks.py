"""The comparison of block sizes by load: what each decoder decodes, when, and how full its scheduler is."""

import pytest
from toys import Digits, Endless, TableLM, table

from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import load_blocks
from speccascade_jax.inference.text import Cascade
from speccascade_jax.settings import Settings

TEXTS = ["201", "1", "02", "221", "120", "0", "11", "210"] * 3


@pytest.fixture(scope="module")
def cascade():
    models, tables = (TableLM(4), TableLM(4)), (table(39, 4), table(40, 4))
    return Cascade(models, tables, Endless(), max_source_length=16, max_new_tokens=12)


def test_each_decoder_writes_the_verifiers_texts_with_twice_as_many_requests_as_rows(cascade):
    settings, rows = Settings(block_size=2), 2
    wanted = sum(len(output.tokens) for output in cascade.generate(TEXTS, settings, method="verifier"))
    for name, decoder in load_blocks.decoders(cascade, settings, rows).items():
        waiting, written, scheduler = [], [], decoder.scheduler
        run, finished = scheduler.run, scheduler.finished

        def watched_run(rounds, scheduler=scheduler, run=run, waiting=waiting):
            waiting.append(len(scheduler.waiting) + len(scheduler.running))
            run(rounds)

        def watched_finished(finished=finished, written=written):
            done = finished()
            written.extend(result.tokens for _, result in done)
            return done

        scheduler.run, scheduler.finished = watched_run, watched_finished
        measured = decoder.run(decoder.requests(cascade, TEXTS))
        assert max(waiting) == waiting[0] == 2 * rows, name
        assert len(written) == len(TEXTS) and sum(map(len, written)) == wanted, name
        assert measured.tokens_per_second > 0 and measured.first_token_ms > 0
        assert measured.block_size == 2 if name == "fixed" else measured.block_size <= 2


def test_passes_alternate_and_are_compared_one_by_one(cascade, monkeypatch):
    """The figures of the first pass of each decoder, which compiles, are not used."""
    speeds = {"by_load": [1, 8, 10, 9], "fixed": [1, 10, 8, 10], "verifier": [99, 1, 2, 12]}
    order, decoders = [], load_blocks.decoders

    def named(*of):
        for name, decoder in (made := decoders(*of)).items():
            left = iter(speeds[name])

            def run(requests, name=name, left=left):
                order.append(name)
                return load_blocks.Pass(next(left), 1.0, 2.0)

            decoder.run = run
        return made

    monkeypatch.setattr(load_blocks, "decoders", named)
    figures = load_blocks.compared(cascade, Settings(block_size=2), 2, TEXTS, passes=3)
    forth = [*speeds]
    assert order == [*forth, *forth, *forth[::-1], *forth]
    assert (figures["ratio"], figures["ratio_least"], figures["ratio_most"]) == (0.8, 0.75, 1.25)
    assert figures["fixed"]["tokens_per_second"] == 10


def test_models_whose_drafts_have_one_size_are_refused():
    models, tables = (TableLM(4),) * 3, tuple(table(39 + n, 4) for n in range(3))
    three = Cascade(models, tables, Digits(), max_source_length=16, max_new_tokens=3)
    with pytest.raises(FieldError, match="one size"):
        load_blocks.compared(three, Settings(block_size=(1, 2)), 2, TEXTS, passes=1)
