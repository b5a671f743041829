"""A sampler object can be used in place of a method's name, in generate() and in a config."""

import collections
import dataclasses
import json
import runpy
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import decoded
from toys import Digits, TableLM, sequence_law, table

from speccascade_jax.commands import main
from speccascade_jax.commands.plan import sampler_runs
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.nests import roll_back
from speccascade_jax.core.protocols import (
    Abilities,
    Block,
    Origin,
    Sampler,
    ability_of,
    states_law,
)
from speccascade_jax.core.randomness import Role, draw
from speccascade_jax.core.rounds import noise_sizes_of, uniforms
from speccascade_jax.core.rules import target_probs
from speccascade_jax.core.samplers import Autoregressive, Speculative, drafts
from speccascade_jax.core.samplers.drafts import DraftKind
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.core.samplers.speculative import can_lag
from speccascade_jax.core.transforms import SamplingOptions, token_probs
from speccascade_jax.core.verification import BLOCK, TOKEN
from speccascade_jax.evaluation.sweep import block_size_of, grid
from speccascade_jax.inference.scoring import Scorer
from speccascade_jax.inference.text import Cascade
from speccascade_jax.planning.prediction import PlannedHierarchy
from speccascade_jax.scheduling.prompts import Request
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


@pytest.mark.full
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
    """Two models with different parameters are distinguished as objects, even if they are equal."""
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


def opt_sampler(cascade, *ways):
    return Speculative(Autoregressive(cascade.drafter), cascade.verifier, NAMED["opt"], 3, verification=ways)


@pytest.mark.parametrize("ways", [(), (TOKEN,)])
def test_a_verification_that_it_lacks_is_refused(cascade, ways):
    """Before models are loaded if it is an object, and with them if it is made of them."""
    sampler = opt_sampler(cascade, *ways) if ways else Autoregressive(cascade.verifier)
    settings = Settings(method=sampler, verification="block")
    made = Settings(method=lambda models: sampler, verification="block")
    assert settings.by(sampler).verification == TOKEN.name and settings.by(made.method) == made
    for refuse in (settings.check, lambda: cascade.checked(settings, {}), lambda: cascade.checked(made, {})):
        with pytest.raises(FieldError) as refused:
            refuse()
        assert (refused.value.field, refused.value.value) == ("verification", "block")
        assert refused.value.remedy == (f"known: {TOKEN.name}." if ways else "leave it out.")


@pytest.mark.full
def test_its_ways_to_verify_can_be_chosen(cascade):
    options = {"temperature": 1.0, "alpha": 0.3}
    both = opt_sampler(cascade, TOKEN, BLOCK)
    for way in both.verifications:
        chosen = written(cascade.generate(TEXTS, sampler=both, verification=way.name, **options))
        assert chosen == written(
            cascade.generate(TEXTS, method="opt", block_size=3, verification=way.name, **options)
        )
    [lane] = cascade.lanes([Settings(method=opt_sampler(cascade, TOKEN))]).values()
    with pytest.raises(FieldError) as refused:
        lane.numbers(Settings(method=opt_sampler(cascade, TOKEN), verification="block"))
    assert (refused.value.field, refused.value.value) == ("verification", "block")


@dataclasses.dataclass(frozen=True)
class Mean:
    """examples/ensemble.py's sampler, which says nothing of itself but what it must."""

    first: Any
    second: Any
    width: int = dataclasses.field(default=1, init=False)
    level: int = dataclasses.field(default=0, init=False)
    overhang: int = dataclasses.field(default=0, init=False)

    models = property(lambda self: (self.first, self.second))

    def plain(self, counts):
        return {"model_passes": int(counts)}

    def step(self, params, caches, rows, eos_id):
        (untransformed, probs), caches = self._both(params, caches, rows, rows.last[:, None])
        token = draw(uniforms(rows, self.level, Role.DRAW, 1)[:, 0], probs[:, 0])[:, None]
        size = jnp.minimum(rows.room, 1)
        caches = roll_back(self.models, caches, rows.start - 1 + size)
        return Block(token, probs, untransformed, jnp.full_like(token, Origin.MODEL), size), caches, size

    def _both(self, params, caches, rows, tokens):
        read = [m.extend(w, tokens, c) for m, w, c in zip(self.models, params, caches, strict=True)]
        logits, caches = zip(*read, strict=True)
        laws = [jax.nn.softmax(x, axis=-1) for x in logits], [token_probs(x, rows.options) for x in logits]
        return tuple(sum(law) / 2 for law in laws), caches


class StatedMean(Mean):
    def laws(self, params, caches, rows, tokens):
        return self._both(params, caches, rows, tokens)[0]


def test_it_says_what_it_can_do():
    silent, stating = (kind(TableLM(4), TableLM(4)) for kind in (Mean, StatedMean))
    defaults = Abilities()._asdict()
    assert {name: ability_of(silent, name) for name in defaults} == defaults and isinstance(silent, Sampler)
    assert not states_law(silent) and states_law(stating)
    for drafter, stated in ((silent, False), (stating, True)):
        assert states_law(Speculative(drafter, TableLM(4), NAMED["opt"], 2)) == stated
        assert states_law(Speculative(drafter, TableLM(4), NAMED["speculative"], 2))


@dataclasses.dataclass(frozen=True)
class Counting(Mean):
    """Counts how often it is asked for what it can do, and for its models."""

    behind: int = 0
    times: collections.Counter = dataclasses.field(default_factory=collections.Counter, compare=False)

    def __getattribute__(self, name):
        if name in Abilities._fields or name == "models":
            super().__getattribute__("times")[name] += 1
        return super().__getattribute__(name)

    def laws(self, params, caches, rows, tokens):
        raise AssertionError


@dataclasses.dataclass(frozen=True)
class Member(TableLM):
    """A part of the network that Counting's second model is."""

    member_of: Any = None


ASKED = [
    (noise_sizes_of, "noise_sizes"),
    (states_law, "states_law"),
    (states_law, "laws"),
    (attrgetter("laws"), "laws"),
    (attrgetter("models"), "models"),
]


@pytest.mark.parametrize("ask,member", ASKED)
def test_what_it_can_do_is_asked_for_once_by_each_level_above(ask, member):
    """And not several times by each for every time that it is asked itself."""
    network = TableLM(4)
    for levels in range(1, 4):
        stub = sampler = Counting(network, network)
        for _ in range(levels):
            methods = NAMED["opt"], NAMED["token_v3"]
            sampler = Speculative(sampler, Member(4, member_of=network), methods, 2)
        stub.times.clear()
        ask(sampler)
        assert 1 <= stub.times[member] <= 1 + levels


@pytest.mark.full(quick=["opt-need"])
@pytest.mark.parametrize("hand_over", ["need", "truncate"])
@pytest.mark.parametrize("method", ["opt", "speculative"])
def test_two_levels_above_it_leave_it_nothing_to_catch_up_on(method, hand_over):
    """It says no `behind`: its caches may lack nothing, so no level above spares it a pass."""
    tables = [table(seed, 4, 3.0) for seed in range(40, 44)]
    sampler, params = Mean(TableLM(4), TableLM(4)), tuple(tables[:2])
    for logits, name in zip(tables[2:], (method, "speculative"), strict=True):
        sampler = Speculative(sampler, TableLM(4), NAMED[name], 2, hand_over=hand_over)
        params = params, logits
    assert not can_lag(sampler) and not sampler.spares
    result, _ = decoded(sampler, params, 4, SamplingOptions(0.0), (0.0, 0.0))
    alone, _ = decoded(Autoregressive(TableLM(4)), tables[-1], 4, SamplingOptions(0.0), ())
    np.testing.assert_array_equal(result.tokens, alone.tokens)


def test_a_law_that_it_states_is_scored():
    """The scores of every text sum to the probability with which it is written."""
    tables = tuple(table(seed, 4) for seed in (39, 40))
    twice = Cascade((TableLM(4),) * 2, tables, Digits(), max_source_length=16, max_new_tokens=2)
    settings, prompt = Settings(method=StatedMean(*twice.models), temperature=1.0), (2, 0, 1)
    [lane] = twice.lanes([settings]).values()
    scorer, request = Scorer(lane.plan, lane.params, 16), Request(prompt, settings, 0, lane.numbers(settings))
    mean = np.log(sum(np.asarray(jax.nn.softmax(rows)) for rows in tables) / 2)
    law = sequence_law((mean,), [], [], prompt, steps=2, eos=3, temperature=1.0)
    scores = [np.exp(scorer(request, list(text)).logprobs.sum()) for text in law]
    np.testing.assert_allclose(scores, list(law.values()), atol=1e-6)


@pytest.mark.full
def test_a_new_way_to_draft_is_an_entry(cascade, monkeypatch):
    """Of the table of what drafts: here every draft is the mean of both models."""
    way = DraftKind(lambda drafters: True, lambda drafters: Mean(drafters.model, cascade.verifier))
    monkeypatch.setattr(drafts, "DRAFTS", (way, *drafts.DRAFTS))
    options = {"temperature": 1.0, "batch_size": 2, "block_size": 4}
    texts = written(cascade.generate(TEXTS, **options))
    sampler = Speculative(Mean(*cascade.models), cascade.verifier, NAMED["speculative"], 4)
    assert texts == written(cascade.generate(TEXTS, sampler=sampler, **options))
    monkeypatch.undo()
    assert texts != written(cascade.generate(TEXTS, **options))


@pytest.mark.parametrize("value", ["verifier", 3, None])
def test_an_object_that_cannot_decode_is_refused(value):
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


@pytest.mark.full
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


@pytest.mark.full
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


def test_a_configs_rule_is_swept_and_timed_next_to_plans(holding):
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


def test_settings_with_a_sampler_object_compare_equal(cascade):
    settings = Settings(method=Autoregressive(cascade.verifier))
    assert settings.scheme(1) == Settings(method=Autoregressive(cascade.verifier)).scheme(1)
    assert dataclasses.replace(settings, seed=3).name == "custom"
