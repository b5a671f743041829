"""Whatever is a sampler stands where a method's name does: in generate() and in a config."""

import dataclasses
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from toys import TableLM

from speccascade_jax.commands import main
from speccascade_jax.commands.plan import sampler_runs
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.rules import target_probs
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.autoregressive import SINGLE_MODEL
from speccascade_jax.evaluation.sweep import block_size_of, grid
from speccascade_jax.inference.text import Cascade
from speccascade_jax.planning.prediction import PlannedHierarchy
from speccascade_jax.settings import NAMED, Settings, named

EXAMPLE = Path(__file__).parents[2] / "examples" / "ensemble.py"
TEXTS = ["the house is small", "a dog", "the old man sees the green tree"]
LIMITS = {"max_source_length": 32, "max_new_tokens": 12}


def written(outputs):
    return [(o.tokens, o.origin, o.level, o.counts) for o in outputs]


@pytest.fixture(scope="module")
def cascade(t5_pair):
    return Cascade.load(t5_pair / "drafter", t5_pair / "verifier", **LIMITS)


def test_it_decodes_as_the_method_that_makes_it(cascade):
    options = {"temperature": 1.0, "batch_size": 2}
    for name, place in (("verifier", -1), ("drafter", 0)):
        sampler = Autoregressive(cascade.models[place])
        assert written(cascade.generate(TEXTS, sampler=sampler, **options)) == written(
            cascade.generate(TEXTS, method=name, **options)
        )
    sampler = Speculative(Autoregressive(cascade.drafter), cascade.verifier, NAMED["opt"], 4)
    assert written(cascade.generate(TEXTS, sampler=sampler, alpha=0.3, **options)) == written(
        cascade.generate(TEXTS, method="opt", block_size=4, alpha=0.3, **options)
    )


def test_rows_of_a_batch_may_differ_in_it(cascade):
    mixed = [
        Settings(method=Autoregressive(cascade.verifier)),
        Settings(method="opt", alpha=0.1),
        Settings(method=SINGLE_MODEL["drafter"]),
    ]
    alike = [list(cascade.generate(TEXTS, settings, batch_size=2)) for settings in mixed]
    expected = [alike[n][n] for n in range(len(mixed))]
    assert written(cascade.generate(TEXTS, mixed, batch_size=2)) == written(expected)


def test_models_of_one_shape_keep_their_parameters(cascade):
    """One object twice, with other parameters: which of the two a sampler means is told by the object."""
    model = cascade.verifier
    twice = Cascade((model, model), cascade.params, cascade.tokenizer, **LIMITS)
    for place, name in enumerate(("drafter", "verifier")):
        texts = written(twice.generate(TEXTS, sampler=Autoregressive(twice.models[place])))
        assert texts == written(twice.generate(TEXTS, method=name))
    small, large = (written(twice.generate(TEXTS, method=name)) for name in ("drafter", "verifier"))
    assert small != large


def test_a_model_that_is_not_the_cascades_is_refused(cascade):
    with pytest.raises(FieldError) as refused:
        list(cascade.generate(TEXTS, sampler=Autoregressive(TableLM(cascade.verifier.vocab_size))))
    assert refused.value.field == "sampler"


@pytest.mark.parametrize("value", ["verifier", 3, None])
def test_what_does_not_decode_is_refused(value):
    with pytest.raises(FieldError) as refused:
        named({"mine": value})
    assert (refused.value.field, refused.value.value) == ("samplers", value)


def test_a_methods_name_is_taken():
    with pytest.raises(FieldError) as refused:
        named({"opt": NAMED["verifier"]})
    assert (refused.value.field, refused.value.value) == ("samplers", "opt")


@pytest.fixture(scope="module")
def ensemble(t5_pair, tmp_path_factory):
    """The example's config for the tiny pair."""
    path = tmp_path_factory.mktemp("configs") / "ensemble.py"
    pair = f"drafter={str(t5_pair / 'drafter')!r}, verifier={str(t5_pair / 'verifier')!r}, examples=()"
    path.write_text(
        f"{EXAMPLE.read_text()}\nconfig = dataclasses.replace(config, {pair}, router=None, "
        "max_source_length=32, max_new_tokens=12)\n"
    )
    return path


def test_a_config_names_it(ensemble, cascade, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    flags = ["--config", str(ensemble), "--output", str(output), "--dtype=float32"]
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    assert main(["decode", *flags, "--input", str(tmp_path / "in.txt")]) == 0
    mean = runpy.run_path(str(ensemble))["Mean"]
    texts = [output.text for output in cascade.generate(TEXTS, sampler=mean(*cascade.models))]
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == texts
    assert main(["decode", *flags[:2], "--method=meen", "--text=a dog"]) == 2
    assert "mean" in capsys.readouterr().err


def margin(scores, alpha):
    """Defers where the drafter's two likeliest tokens are close."""
    best, second = jnp.split(jax.lax.top_k(scores.q, 2)[0], 2, axis=-1)
    delta = best - second < 1 - alpha
    return target_probs(scores.q_sampled, scores.p_sampled, delta), delta


RULE = Method(margin, low=0, high=1, summary="defer where the drafter hesitates", name="margin")


@pytest.fixture
def holding(t5_pair):
    """A config that holds a rule where a name could stand."""
    return DecodeConfig(
        drafter=str(t5_pair / "drafter"),
        verifier=str(t5_pair / "verifier"),
        method=RULE,
        alpha=0.7,
        temperature=1.0,
        dtype="float32",
        **LIMITS,
    )


def test_a_config_holds_a_rule(holding, cascade):
    """It decodes as the rule itself does, has a name, and is known by it in what is recorded."""
    holding.check()
    assert (holding.method, holding.samplers) == ("margin", {"margin": RULE})
    record = json.loads(json.dumps(holding.record()))
    assert (record["method"], record["samplers"]) == ("margin", {"margin": "margin"})
    texts = written(Cascade.from_config(holding).generate(TEXTS, holding.settings))
    assert texts == written(cascade.generate(TEXTS, method=RULE, alpha=0.7, temperature=1.0))
    assert texts != written(cascade.generate(TEXTS, alpha=0.7, temperature=1.0))
    assert dataclasses.replace(holding, method=NAMED["opt"]).method == "opt"


def test_a_configs_rule_stands_in_a_sweep_and_next_to_plans(holding):
    """At every block size and lenience, as the rules of the table do. No plan is lossy."""
    known = {**NAMED, **named(holding.samplers)}
    points = grid(holding.settings, ["margin"], [0.1, 0.5], [2, 3], [1.0], known=known)[2:]
    assert {(p.name, p.alpha, block_size_of(p)) for p in points} == {
        ("margin", alpha, size) for alpha in (0.1, 0.5) for size in (2, 3)
    }
    target = PlannedHierarchy(("verifier",), (), "need", 0.001, (1.0,))
    lossless = dataclasses.replace(holding, method=dataclasses.replace(RULE, lossless=True, name="same"))
    assert set(sampler_runs(lossless, target, ("drafter", "verifier"))) == {"same"}


def test_a_server_takes_requests_for_a_configs_rule(holding):
    pytest.importorskip("starlette")
    from speccascade_jax.serving.models import ServedModel

    served = ServedModel("it", holding, Cascade.from_config(holding), ("opt",), rows=2)
    assert served.methods == ("margin", "opt")
    lane, [number] = served.place(served.cascade.checked(served.defaults, {}))
    assert lane.lane.methods[0][number].target is margin


@pytest.mark.parametrize("names", [("", ""), ("opt", ""), ("a", "a")])
def test_two_objects_of_one_name_are_refused(holding, names):
    """An object without a name is called custom."""
    first, second = (
        dataclasses.replace(RULE, name=name, high=high) for name, high in zip(names, (1, 2), strict=True)
    )
    with pytest.raises(FieldError) as refused:
        dataclasses.replace(holding, method=(first, second))
    assert (refused.value.field, refused.value.value) == ("method", names[0] or "custom")


def test_settings_with_it_are_a_rows_own(cascade):
    settings = Settings(method=Autoregressive(cascade.verifier))
    assert settings.scheme(1) == Settings(method=Autoregressive(cascade.verifier)).scheme(1)
    assert dataclasses.replace(settings, seed=3).name == "custom"
