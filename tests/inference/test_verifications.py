"""Settings.verification: how drafts are verified, from settings to texts, in batches and refilled rows."""

import dataclasses

import pytest
from refusals import check_about, refusals
from toys import Digits, TableLM, table

from speccascade_jax.baselines import BASELINES
from speccascade_jax.commands import decode
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers.named import SAMPLERS
from speccascade_jax.core.verification import TOKEN, VERIFICATIONS, verifications_of
from speccascade_jax.evaluation.sweep import grid
from speccascade_jax.inference.text import Cascade
from speccascade_jax.settings import NAMED, Settings

SCHEMES = {**BASELINES, **SAMPLERS}


def cascade(models=2):
    tables = tuple(table(39 + n, 4) for n in range(models))
    return Cascade((TableLM(4),) * models, tables, Digits(), max_source_length=16, max_new_tokens=8)


@pytest.mark.parametrize(
    "models,sizes",
    [(2, 3), *(pytest.param(*more, marks=pytest.mark.full) for more in ((3, (1, 3)), (2, "adaptive")))],
)
def test_rows_of_a_batch_are_verified_in_their_own_ways(models, sizes):
    """Also in rows that have been another text's: there are more texts than rows."""
    each = [
        Settings(
            temperature=1.0,
            block_size=sizes,
            seed=n,
            max_new_tokens=3 + n % 6,
            verification=way,
            max_block_size=3,
        )
        for n, way in enumerate(list(VERIFICATIONS) * 24)
    ]
    texts = ["201", "1", "10"] * (len(each) // 3)
    many = [*cascade(models).generate(texts, each, batch_size=4)]
    alone = cascade(models)
    for n, (text, settings) in enumerate(zip(texts, each, strict=True)):
        [output] = alone.generate([text], settings, first_index=n)
        assert (many[n].tokens, many[n].origin) == (output.tokens, output.origin)
        assert output.origin.count("draft") == output.counts["accepted"]
    first = next(iter(VERIFICATIONS))
    same = [dataclasses.replace(settings, verification=first) for settings in each]
    others = alone.generate(texts, same, batch_size=4)
    assert [row.tokens for row in many] != [other.tokens for other in others]  # the control


def test_a_stream_as_a_block_ends_with_the_text_of_generate():
    """At any temperature; greedy texts are those of verification by token, too."""
    made = cascade()
    for seed, temperature in enumerate((0.0, 0.7, 1.0, 1.0)):
        settings = Settings(temperature=temperature, block_size=3, seed=seed, verification="block")
        [output] = made.generate(["201"], settings)
        assert [*made.stream("201", settings)][-1] == output.text
        if temperature == 0:
            [by_token] = made.generate(["201"], settings, verification="token")
            assert by_token.tokens == output.tokens


def test_an_unknown_verification_is_refused():
    with pytest.raises(FieldError) as error:
        Settings(verification="whole").check()
    assert (error.value.field, error.value.value) == ("verification", "whole")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_method_that_verifies_in_no_such_way_refuses_it(name):
    """Before models are loaded and with them, and only what is not the usual way."""
    made, settings = cascade(), Settings(method=name, verification="block")
    for refuse in (settings.check, lambda: made.generate(["1"], settings), lambda: made.precompile(settings)):
        with pytest.raises(FieldError) as error:
            refuse()
        assert (error.value.field, error.value.value) == ("verification", "block")
    usual = dataclasses.replace(settings, verification=TOKEN.name)
    assert usual == made.checked(usual, {}) == Settings(verification="block").by(name)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_an_entry_says_of_its_ways_to_verify_is_what_its_sampler_does(name):
    assert SCHEMES[name].verifications == verifications_of(SCHEMES[name].sampler(cascade().models))


def test_a_single_model_verifies_nothing():
    made = cascade(1)
    for method in ("speculative", "verifier"):
        with pytest.raises(FieldError) as error:
            made.generate(["1"], method=method, verification="block")
        assert (error.value.field, error.value.value) == ("verification", "block")
        made.generate(["1"], method=method)


def test_a_command_refuses_it_before_models_are_loaded():
    flags = ["--drafter=none", "--verifier=none", "--method=token_cascade", "--verification=block"]
    with refusals() as errors:
        assert decode.main(flags) == 2
    check_about(errors[0], "verification", "block")


def test_a_sweep_asks_only_methods_that_verify_in_this_way():
    base = Settings(verification="block")
    points = grid(base, [name for name in NAMED if not NAMED[name].sweep.between], [0.0], [2], [0.0])
    assert {point.verification for point in points if point.method in SCHEMES} == {TOKEN.name}
    assert {point.verification for point in points if point.method not in SCHEMES} == {"block"}
