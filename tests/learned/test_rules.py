"""Learned rules: their law, their training, their files, and refusals."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hostile import INSTEAD
from joint_laws import EOS, FAIL_BELOW, PROMPTS, STEPS, TABLES, VOCAB, decoded
from refusals import check_about, refusals
from toys import TableLM, chi_square, entropy, pair, sequence_law, target, transform

from speccascade_jax.commands import decode, finetune
from speccascade_jax.config import LearnedRuleConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.rules import METHODS, TRAINED, Scores
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.learned import rules as learned_rules
from speccascade_jax.learned.rules import FEATURES, Weights
from speccascade_jax.settings import Settings
from speccascade_jax.training.data import Batch, pad
from speccascade_jax.training.learned_rules import (
    ALPHAS,
    Observed,
    errors,
    fit_mixture,
    fit_router,
    gains,
    kept,
    mixture_loss,
    observed,
    prices,
)
from speccascade_jax.training.rollouts import Tried

SEEN = np.random.default_rng(2)  # whose network decides both ways
WEIGHTS = Weights(*(SEEN.normal(size=shape).astype(np.float32) for shape in ((len(FEATURES), 5), 5, 5)))
NOTHING = Weights(*(np.zeros_like(x) for x in WEIGHTS))


@pytest.fixture
def rng():
    """A test's own: what it draws does not depend on the tests before it."""
    return np.random.default_rng(3)


def features_by_hand(q, p, qs, ps):
    """FEATURES of one position, in float64."""
    differs = np.maximum(ps - qs, 0).sum()
    means = [(np.maximum(gap, 0) / (differs or 1)) @ law for gap in (qs - ps, ps - qs) for law in (q, p)]
    return np.array(
        [q.max(), p.max(), entropy(q), entropy(p), differs, *means, *np.log(np.add(means, 1e-3)) / 4]
    )


def by_hand(weights, reads=lambda q, p, qs, ps: (q, p), mixes=False):
    """The target distribution, a position at a time, in float64."""

    def law(q, p, qs, ps, alpha, greedy=False):
        read = features_by_hand(*reads(q, p, qs, ps), qs, ps)
        network = np.tanh(read @ weights.hidden + weights.bias) @ weights.out
        if mixes:
            odds = alpha / (1 - alpha) * np.exp(network)
            return (odds * qs + ps) / (1 + odds)
        plain = np.clip((read[1] - read[0]) / max(read[4], 1e-3), -1, 1)
        return ps if plain + network > alpha else qs

    return law


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_method_follows_its_law(name, rows):
    """Its decisions read the models' own distributions; with transformed ones the law is another."""
    mixes = name == "learned_mixture"
    weights = WEIGHTS._replace(out=6 * WEIGHTS.out) if mixes else WEIGHTS  # far from mixture
    options = {"temperature": 1.5, "top_p": 0.8} if mixes else {"temperature": 0.7, "top_p": 0.95}
    method = learned_rules.method_of(weights, name)
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), method, 2)
    result, which = decoded(sampler, tuple(TABLES[:2]), rows, SamplingOptions(**options), [0.4])
    assert mixes or 0 < result.counts[1].deferred.sum() < result.counts[1].drafted.sum()

    def p_value(law):
        return 2 * min(
            chi_square(
                np.asarray(result.tokens)[which == n],
                sequence_law(TABLES[:2], [law], [0.4], prompt, steps=STEPS, eos=EOS, **options),
            )
            for n, prompt in enumerate(PROMPTS)
        )

    assert p_value(by_hand(weights, mixes=mixes)) > FAIL_BELOW
    assert p_value(by_hand(weights, lambda q, p, qs, ps: (qs, ps), mixes)) < FAIL_BELOW
    assert p_value(by_hand(weights, lambda q, p, qs, ps: (p, q), mixes)) < FAIL_BELOW  # planted: exchanged
    assert p_value(by_hand(NOTHING, mixes=mixes)) < FAIL_BELOW


def test_a_mixture_that_has_learnt_nothing_is_mixture(rng):
    q, p = (jnp.asarray(x, jnp.float32) for x in rng.dirichlet(np.ones(6), (2, 3, 4)))
    scores = Scores(q, p, q, p, jnp.asarray(False))
    for alpha in (0.0, 0.3, 1.0, jnp.full((3, 1, 1), 0.6)):
        law, _ = learned_rules.method_of(NOTHING, "learned_mixture").target(scores, alpha)
        np.testing.assert_allclose(law, METHODS["mixture"].target(scores, alpha)[0], atol=1e-6)
    expected = by_hand(WEIGHTS, mixes=True)(*(np.asarray(x[1, 2], np.float64) for x in (q, p, q, p)), 0.3)
    law, _ = learned_rules.method_of(WEIGHTS, "learned_mixture").target(scores, 0.3)
    np.testing.assert_allclose(law[1, 2], expected, atol=1e-5)


def test_a_router_that_has_learnt_nothing_is_opt(rng):
    for temperature in (0.0, 0.7, 1.0):
        for _ in range(30):
            q, p = rng.dirichlet(np.ones(6), 2).astype(np.float32)
            qs, ps = (transform(x, temperature) for x in (q, p))
            for alpha in (0.0, 0.3):
                scores = Scores(*map(jnp.asarray, (q, p, qs, ps, temperature == 0)))
                law, _ = learned_rules.method_of(NOTHING).target(scores, alpha)
                wanted = target("opt", q, p, qs, ps, alpha, temperature == 0)
                np.testing.assert_allclose(law, wanted, atol=1e-6)


def test_features_are_as_by_hand(rng):
    """Of distributions that were cut, too, and 0 where the laws agree, where there is nothing to decide."""
    for k in range(40):
        q, p = rng.dirichlet(np.ones(6), 2)
        qs, ps = (transform(x, (0.0, 0.7, 1.0)[k % 3], top_p=(None, 0.6)[k % 2]) for x in (q, p))
        ps = qs if k == 30 else ps
        scores = Scores(*(jnp.asarray(x, jnp.float32) for x in (q, p, qs, ps)), jnp.asarray(k % 3 == 0))
        np.testing.assert_allclose(learned_rules.features(scores), features_by_hand(q, p, qs, ps), atol=1e-4)


def known(rng, count):
    """Features drawn at random, of positions where the laws disagree for certain."""
    features = rng.random((count, len(FEATURES))).astype(np.float32)
    features[:, FEATURES.index("TV(p~, q~)")] = 1.0
    return features


def test_training_finds_what_opt_misses(rng):
    """A verifier that is right half as often as it says, where it is sure: there its token is worth less."""
    config = LearnedRuleConfig("toy", "toy.json", "toy", steps=600)
    whole = known(rng, 20_000)
    q, p = whole[:, :2].T
    advantage = np.where(p > 0.5, 0.5, 1.0) * p - q
    tries = Tried(whole, 30 * (advantage + 0.5 * rng.normal(size=len(whole))), np.zeros(len(whole)))
    weights = fit_router(tries, config)
    plain = learned_rules.plain_advantage(whole)
    np.testing.assert_allclose(plain, p - q, atol=1e-6)
    estimate = plain + learned_rules.network(weights, whole)
    assert np.corrcoef(estimate, advantage)[0, 1] > 0.94 > np.corrcoef(p - q, advantage)[0, 1] + 0.05
    figures = gains(weights, tries)
    for what in ("correlation with the advantage", "gain from deferring half"):
        assert figures[f"{what}, network"] > figures[f"{what}, opt"] > 0
    best = 30 * np.where(advantage >= np.median(advantage), advantage, 0).mean()
    assert 0.9 * best < kept(estimate, tries) < 1.1 * best


def test_the_observations_of_a_mixture():
    """How likely each token of some texts is to both models, and what is known before it."""
    cascade, prompts = pair(), ["1", "12", "20"]
    sources, length = pad(cascade.encode(prompts)[0], 4, 0)
    batch = Batch(sources, length, np.array([[3, 1, 2], [2, 3, 0], [1, 0, 0]], np.int32), np.array([3, 2, 1]))
    seen = observed(cascade, [batch])
    whole = [[*s[:n], *t[:m]] for s, n, t, m in zip(*map(np.asarray, batch), strict=True)]
    chances, features = [], []
    for text, n, m in zip(whole, length, batch.target_length, strict=True):
        for at in range(n, n + m):
            logits = [params[text[at - 2] if at > 1 else 0, text[at - 1]] for params in cascade.params]
            q, p = (np.exp(x) / np.exp(x).sum() for x in logits)
            chances.append([q[text[at]], p[text[at]]])
            features.append(features_by_hand(q, p, q, p))
    np.testing.assert_allclose(seen.chances, chances, atol=1e-6)
    np.testing.assert_allclose(seen.features, features, atol=1e-4)
    np.testing.assert_array_equal(seen.texts, [0, 0, 0, 1, 1, 2])


def test_training_finds_where_the_drafter_is_worth_more(rng):
    """A drafter that is better than its verifier where it is sure, and worse elsewhere."""
    config = LearnedRuleConfig("toy", "toy.json", "toy", method="learned_mixture", steps=200)
    whole = known(rng, 8_000)
    sure = whole[:, 0] > 0.5
    chances = np.stack([np.where(sure, 0.8, 0.1), np.where(sure, 0.4, 0.6)], axis=1).astype(np.float32)
    seen = Observed(whole, chances, np.zeros(len(whole)))
    worth = prices(seen)
    for n, alpha in enumerate(ALPHAS):  # the best constant weight at its price
        near = [mixture_loss(np.full(len(whole), alpha + off), worth[n], seen) for off in (-0.02, 0, 0.02)]
        assert worth[n] == 0 or near[1] <= min(near) + 1e-6
    weights = fit_mixture(seen, config)
    losses = errors(weights, seen)
    assert losses["loss, network"] < losses["loss, mixture"] - 0.02
    weight = learned_rules.drafters_weight(weights, whole, 0.5)
    assert weight[whole[:, 0] > 0.6].min() > weight[whole[:, 0] < 0.4].max()


@pytest.mark.full
def test_a_file_decodes_by_its_network(tmp_path):
    path = tmp_path / "router.json"
    path.write_text(learned_rules.described(WEIGHTS, pair="toy"))
    options = {"method": "router", "alpha": 0.3, "temperature": 1.0}
    texts = [
        [o.tokens for o in cascade.generate(["1", "12", "20"] * 4, batch_size=4, **{**options, **more})]
        for cascade, more in (
            (pair(trained=learned_rules.load(path)), {}),
            (pair(), {"method": "opt"}),
            (pair(trained=learned_rules.method_of(NOTHING)), {}),
        )
    ]
    assert texts[0] != texts[1] == texts[2]


def test_only_routers_files_are_read(tmp_path):
    path, options = tmp_path / "router.json", {"method": "router", "alpha": 0.3}
    path.write_text(learned_rules.described(WEIGHTS, pair="toy"))
    assert pair(trained=learned_rules.load(path)).checked(Settings(), options).name == "router"
    with pytest.raises(FieldError) as error:
        pair().checked(Settings(), options)
    assert (error.value.field, error.value.value) == ("method", "router")
    with pytest.raises(FieldError) as error:
        pair(trained=learned_rules.load(path)).checked(Settings(), {**options, "method": "learned_mixture"})
    assert (error.value.field, error.value.value) == ("method", "learned_mixture")
    path.write_text(learned_rules.described(WEIGHTS, "learned_mixture", pair="toy"))
    assert learned_rules.load(path).name == "learned_mixture" and learned_rules.load(path).high == 1


F = len(FEATURES)
NONSENSE = {
    "a method": {"method": "opt"},
    "units": {"bias": [1.0]},
    "NaN": {"out": [float("nan")] * 5},
    "features": {"features": ["x"]},
    "a text": {"hidden": "x"},
    "no numbers": {"out": [None] * 5},
    "digits": {"out": [10**400] * 5},
    "large": {"out": [1e300] * 5},
    "sums overflow": {"bias": [1e30] * 5},
    "no units": {"hidden": [[]] * F, "bias": [], "out": []},
    "numbers for arrays": {"hidden": [0.0] * F, "bias": 0.0, "out": 0.0},
    "two layers": {"hidden": [[[0.0] * 3] * 2] * F, "bias": [[0.0] * 3] * 2, "out": [[0.0] * 3] * 2},
    "ragged": {"hidden": [[0.0] * 5] * (F - 1) + [[0.0]]},
    "an object": {"bias": {"a": 1}},
    "a list for a method": {"method": ["router"]},
    "no features": {"features": 3},
}


@pytest.mark.parametrize("case", NONSENSE)
def test_invalid_numbers_and_shapes_are_refused(case, tmp_path, recwarn):
    path = tmp_path / "router.json"
    path.write_text(json.dumps({**json.loads(learned_rules.described(WEIGHTS)), **NONSENSE[case]}))
    refuses(path)
    assert not recwarn.list


def refuses(path):
    with pytest.raises(FieldError) as error:
        learned_rules.load(path)
    assert (error.value.field, error.value.value) == ("router", str(path))


@pytest.mark.parametrize("instead", [name for name in INSTEAD if name != "an endless device"])
def test_a_file_that_is_no_router_is_refused(instead, tmp_path):
    """A pipe does not hang the reader, and a sparse terabyte takes no memory."""
    INSTEAD[instead](tmp_path / "router.json")
    refuses(tmp_path / "router.json")


def test_an_invalid_router_is_refused(tmp_path):
    for path in (tmp_path / "none.json", "/dev/zero", "a\0b", "\ud800", "x" * 5000):
        refuses(path)


CONFIGS = {
    "pair": """
from speccascade_jax.config import DecodeConfig
config = DecodeConfig(drafter={drafter!r}, verifier={verifier!r}, max_source_length=32, max_new_tokens=24)
""",
    "task": """
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config
task = Task(train="", validation={data!r}, test="", max_source_length=32, max_target_length=24)
config = TrainConfig(name="tiny", output_dir="", model=T5Config(), task=task)
""",
    "router": """
from speccascade_jax.commands import decode, finetune
from speccascade_jax.config import LearnedRuleConfig
from speccascade_jax.core.errors import FieldError
config = LearnedRuleConfig("tiny", {output!r}, pair={pair!r}, task={task!r}, steps=20)
""",
}


@pytest.mark.full
def test_a_config_trains_a_file_that_decodes(t5_pair, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    lines = [{"source": f"the cat {n}", "target": "a dog sings"} for n in range(40)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {name: str(tmp_path / f"{name}.py") for name in CONFIGS}
    output = str(tmp_path / "made" / "router.json")
    for name, text in CONFIGS.items():
        Path(names[name]).write_text(
            text.format(
                drafter=str(t5_pair / "drafter"),
                verifier=str(t5_pair / "verifier"),
                data=str(data),
                output=output,
                pair=names["pair"],
                task=names["task"],
            )
        )
    mixture = f"--output={tmp_path / 'mixture.json'}"
    for flags, said in (
        ([], "gain from deferring half, opt"),
        (["--method=learned_mixture", mixture], "loss, mixture"),
    ):
        assert finetune.main([f"--config={names['router']}", "--examples=32", *flags]) == 0
        assert f"on held-out texts, {said}" in capsys.readouterr().out
    untrained = ["--method=learned_mixture", "--text=the cat", f"--output={tmp_path / 'none.jsonl'}"]
    with refusals() as errors:
        assert decode.main([f"--config={names['pair']}", *untrained]) == 2
    check_about(errors[0], "method", "learned_mixture")
    assert not (tmp_path / "none.jsonl").exists()
    assert json.loads(Path(output).read_text())["about"]["split"] == "validation"
    assert (
        decode.main(
            [
                f"--config={names['pair']}",
                "--method=router",
                "--alpha=0.1",
                f"--router={output}",
                "--text=the cat",
            ]
        )
        == 0
    )
    for flag, field, value in (
        ("--split=dev", "split", "dev"),
        (f"--output={output[:-5]}", "output", output[:-5]),
    ):
        with refusals() as errors:
            assert finetune.main([f"--config={names['router']}", flag]) == 2
        check_about(errors[0], field, value)
    assert finetune.main([f"--config={names['router']}", "--pair=router_of_none"]) == 2
    assert "no config" in capsys.readouterr().err
    assert decode.main([f"--config={names['router']}", "--text=the cat"]) == 2
    assert "trains the method router; its pair is" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"examples": 0},
        {"split": "dev"},
        {"output": "router.txt"},
        {"width": 0},
        {"learning_rate": float("nan")},
        {"seed": -1},
        {"temperatures": ()},
        {"temperatures": (1.0, -0.5)},
        {"temperatures": (float("nan"),)},
        {"top_ps": (0.0,)},
        {"top_ps": (1.0, 1.5)},
        {"places": 0},
        {"top_ps": (0.5,), "method": "learned_mixture"},
        {"places": 3, "method": "learned_mixture"},
    ],
)
def test_invalid_configs_are_refused(change):
    with pytest.raises(FieldError) as error:
        dataclasses.replace(LearnedRuleConfig("toy", "toy.json", "toy"), **change).check()
    field, value = next(iter(change.items()))
    assert error.value.field == field and str(error.value.value) == str(value)
