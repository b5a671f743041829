"""Stored texts of a cascade that looks up its drafts: where they begin and end, and what is refused."""

import pytest
from served_toys import toy_lookup

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers.lookup import MODEL_FREE
from speccascade_jax.core.samplers.stored import REACH
from speccascade_jax.inference import text
from speccascade_jax.inference.text import Cascade


def cascade_of(texts, start=None, **fields):
    toy = toy_lookup().cascade
    models = (MODEL_FREE["lookup"].model(4, start), *toy.models[1:])
    return Cascade(models, toy.params, toy.tokenizer, model_free=toy.model_free, lookup_texts=texts, **fields)


@pytest.mark.parametrize(
    "fields,before",
    [({"start": 0}, [0]), ({"suffix": "21"}, [2, 1]), ({"suffix": "0121"}, [1, 2, 1]), ({"prefix": "2"}, [])],
)
def test_stored_texts_are_surrounded_as_outputs_are(fields, before):
    """An output follows the start token, or the end of its prompt, as far as all prompts have the same."""
    cascade = cascade_of(["01", "2"], **fields)
    [index] = cascade.made.values()
    eos = cascade.tokenizer.eos_id
    assert index.tokens.tolist() == [*before, 0, 1, eos, *before, 2, eos, *[0] * REACH]
    sampler, params = cascade.sampler(cascade.checked(text.Settings(), {}))
    assert params[0] is index and sampler.models[0] is cascade.drafter


def test_outputs_of_equal_texts_need_fewer_calls():
    inputs = ["2012", "0", "1120"]
    written = list(cascade_of(()).generate(inputs, temperature=0.0))
    again = list(cascade_of([output.text for output in written]).generate(inputs, temperature=0.0))
    assert [output.text for output in again] == [output.text for output in written]
    calls = [sum(output.counts["rounds"] for output in outputs) for outputs in (again, written)]
    assert calls[0] < calls[1]


def test_unsuitable_texts_are_refused(monkeypatch):
    toy = toy_lookup().cascade
    with pytest.raises(FieldError, match="no drafter searches texts") as refused:
        Cascade(toy.models[1:], toy.params[1:], toy.tokenizer, lookup_texts=["0"])
    assert refused.value.field == "lookup_texts"
    monkeypatch.setattr(text, "MOST_TOKENS", 5)
    cascade_of(["01", "2"])
    with pytest.raises(FieldError, match="have 6 tokens; give at most 5"):
        cascade_of(["01", "20"])
