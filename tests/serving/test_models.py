"""What a served model asks its scheduler for."""

import json

import pytest

pytest.importorskip("starlette")

from speccascade_jax.config import DEMO, DecodeConfig
from speccascade_jax.inference.text import Cascade
from speccascade_jax.serving.models import ServedModel
from speccascade_jax.serving.protocol import Refused, parse


def served(t5_pair, **fields):
    """A drafter of another vocabulary than the verifier's."""
    run = DecodeConfig(drafter=str(DEMO / "e2e_drafter"), verifier=str(t5_pair / "verifier"),
                       max_source_length=32, max_new_tokens=12, temperature=1.0,
                       **{"block_size": 2, **fields})
    cascade = Cascade.from_config(run)
    return cascade, ServedModel("it", run, cascade, (), rows=2)


@pytest.mark.full
def test_a_drafter_of_another_vocabulary_reads_the_prompt_as_in_a_file(t5_pair):
    cascade, model = served(t5_pair, method="opt", alpha=0.1)
    texts = ["the cat", "a dog sees the cat"]
    asked = parse(json.dumps({"prompt": texts}).encode(), "completion")
    settings = model.settings(asked)
    scheduler, results = model.lane(settings).scheduler, {}
    ids = scheduler.admit([model.request(one, settings, n) for n, one in enumerate(model.prompts(asked))])
    while scheduler.busy:
        scheduler.run()
        results |= dict(scheduler.finished())
    for number, output in zip(ids, cascade.generate(texts, settings), strict=True):
        assert results[number].tokens == output.tokens and results[number].origin == output.origin


@pytest.mark.full
def test_adaptive_blocks_are_served_up_to_each_requests_own(t5_pair):
    _, model = served(t5_pair, method="opt", alpha=0.1, block_size="adaptive", max_block_size=3,
                      stop_below=0.0)

    def histogram(**asked):
        parsed = parse(json.dumps({"prompt": "the cat", "seed": 1, **asked}).encode(), "completion")
        settings = model.settings(parsed)
        scheduler = model.lane(settings).scheduler
        scheduler.admit([model.request(model.prompts(parsed)[0], settings, 0)])
        while scheduler.busy:
            scheduler.run()
        [(_, result)] = scheduler.finished()
        return result.counts["drafted"], result.counts["rounds"]

    drafted, rounds = histogram(block_size="adaptive")
    assert drafted > 2 * rounds
    drafted, rounds = histogram(max_block_size=1)
    assert drafted <= rounds
    for asked, said in (({"max_block_size": 4}, "at most 3"), ({"block_size": 2}, "server's is adaptive")):
        with pytest.raises(Refused, match=said):
            histogram(**asked)
