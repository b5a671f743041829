"""Methods that learn: their law, what they learn, their files, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, PROMPTS, STEPS, TABLES, VOCAB, decoded
from toys import TableLM, chi_square, entropy, pair, sequence_law, target, transform

from speccascade_jax.commands import decode, finetune
from speccascade_jax.config import RouterConfig
from speccascade_jax.core.methods import METHODS
from speccascade_jax.core.rules import Scores
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.inference import router
from speccascade_jax.inference.router import FEATURES, Weights
from speccascade_jax.inference.settings import TRAINED, Settings
from speccascade_jax.training.data import Batch, pad
from speccascade_jax.training.router import (
    ALPHAS,
    Observed,
    errors,
    fit,
    mixture_loss,
    observed,
    prices,
    translated,
)

RNG = np.random.default_rng(3)
WEIGHTS = Weights(*(RNG.normal(size=shape).astype(np.float32) for shape in ((len(FEATURES), 5), 5, 5)))
NOTHING = Weights(*(np.zeros_like(x) for x in WEIGHTS))


def by_hand(weights, gains_from=lambda q, p, qs, ps: (q, p), mixes=False):
    """The target distribution, a position at a time, in float64."""
    def law(q, p, qs, ps, alpha):
        q, p = gains_from(q, p, qs, ps)
        features = np.array([q.max(), p.max(), entropy(q), entropy(p), np.maximum(p - q, 0).sum(),
                             q[p.argmax()], p[q.argmax()], np.maximum(ps - qs, 0).sum(),
                             qs @ q, qs @ p, ps @ q, ps @ p])
        network = np.tanh(features @ weights.hidden + weights.bias) @ weights.out
        if mixes:
            odds = alpha / (1 - alpha) * np.exp(network)
            return (odds * qs + ps) / (1 + odds)
        return ps if ps @ p - qs @ q + network > alpha * np.maximum(ps - qs, 0).sum() else qs

    return law


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained_follows_its_law(name, rows):
    """Its decisions read the models' own distributions; with transformed ones the law is another."""
    mixes = name == "learned_mixture"
    weights = WEIGHTS._replace(out=6 * WEIGHTS.out) if mixes else WEIGHTS  # far from mixture
    options = {"temperature": 1.5, "top_p": 0.8} if mixes else {"temperature": 0.7, "top_p": 0.95}
    method = router.method_of(weights, name)
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), method, 2)
    result, which = decoded(sampler, tuple(TABLES[:2]), rows, SamplingOptions(**options), [0.4])
    assert mixes or 0 < result.counts[1].deferred.sum() < result.counts[1].drafted.sum()

    def p_value(law):
        return 2 * min(chi_square(np.asarray(result.tokens)[which == n], sequence_law(
            TABLES[:2], [law], [0.4], prompt, steps=STEPS, eos=EOS, **options))
            for n, prompt in enumerate(PROMPTS))

    assert p_value(by_hand(weights, mixes=mixes)) > FAIL_BELOW
    assert p_value(by_hand(weights, lambda q, p, qs, ps: (qs, ps), mixes)) < FAIL_BELOW
    assert p_value(by_hand(weights, lambda q, p, qs, ps: (p, q), mixes)) < FAIL_BELOW  # planted: exchanged
    assert p_value(by_hand(NOTHING, mixes=mixes)) < FAIL_BELOW


def test_a_mixture_that_has_learnt_nothing_is_mixture():
    q, p = (jnp.asarray(x, jnp.float32) for x in RNG.dirichlet(np.ones(6), (2, 3, 4)))
    scores = Scores(q, p, q, p, jnp.asarray(False))
    for alpha in (0.0, 0.3, 1.0, jnp.full((3, 1, 1), 0.6)):
        found, _ = router.method_of(NOTHING, "learned_mixture").target(scores, alpha)
        np.testing.assert_allclose(found, METHODS["mixture"].target(scores, alpha)[0], atol=1e-6)
    own = by_hand(WEIGHTS, mixes=True)(*(np.asarray(x[1, 2], np.float64) for x in (q, p, q, p)), 0.3)
    found, _ = router.method_of(WEIGHTS, "learned_mixture").target(scores, 0.3)
    np.testing.assert_allclose(found[1, 2], own, atol=1e-5)


def test_a_router_that_has_learnt_nothing_is_opt_where_it_is_greedy():
    for _ in range(50):
        q, p = RNG.dirichlet(np.ones(6), 2).astype(np.float32)
        greedy = [np.eye(6)[x.argmax()] for x in (q, p)]
        for alpha in (0.0, 0.3):
            scores = Scores(*map(jnp.asarray, (q, p, *greedy, True)))
            found, _ = router.method_of(NOTHING).target(scores, alpha)
            np.testing.assert_array_equal(found, target("opt", q, p, *greedy, alpha, True))


def test_what_a_router_learns_from():
    """The gain at each token of some texts, by the two models' transformed laws there, a temperature after
    the other; and what the verifier writes itself, where greedily deferring never loses."""
    cascade, prompts = pair(), ["1", "12", "20"]
    sources, length = pad(cascade.encode(prompts)[0], 4, 0)
    batch = Batch(sources, length, np.array([[3, 1, 2], [2, 3, 0], [1, 0, 0]], np.int32), np.array([3, 2, 1]))
    temperatures = (0.0, 0.7)
    seen = observed(cascade, [batch], [SamplingOptions(temperature) for temperature in temperatures])
    whole = [[*s[:n], *t[:m]] for s, n, t, m in zip(*map(np.asarray, batch), strict=True)]
    for k, temperature in enumerate(temperatures):
        gains = []
        for text, n, m in zip(whole, length, batch.target_length, strict=True):
            for at in range(n, n + m):
                logits = [own[text[at - 2] if at > 1 else 0, text[at - 1]] for own in cascade.params]
                q, p = (transform(np.exp(x) / np.exp(x).sum(), temperature, None, None) for x in logits)
                gains.append(p[text[at]] - q[text[at]])
        np.testing.assert_allclose(seen.gains[6 * k:6 * k + 6], gains, atol=1e-6)
    written, = translated(cascade, [batch])
    for n, output in enumerate(cascade.generate(prompts, method="verifier")):
        np.testing.assert_array_equal(written.target[n, :written.target_length[n]], output.tokens)
    assert (observed(cascade, [written], [SamplingOptions(0.0)]).gains >= 0).all()
    assert (seen.gains < 0).any()


def test_training_finds_what_the_plug_in_misses():
    """A drafter that is right half as often as it says, where it is sure: no gain there by max p - max q."""
    config = RouterConfig("toy", "toy.json", "toy", steps=300)
    whole = RNG.random((20_000, len(FEATURES))).astype(np.float32)
    whole[:, FEATURES.index("mean q of q~")], whole[:, FEATURES.index("mean p of p~")] = whole[:, :2].T
    right_q = RNG.random(len(whole)) < np.where(whole[:, 0] > 0.5, 0.5, 1.0) * whole[:, 0]
    gains = (RNG.random(len(whole)) < whole[:, 1]).astype(np.float32) - right_q
    seen = Observed(whole, gains, np.zeros((len(gains), 2), np.float32), np.zeros(len(gains)))
    weights = fit(seen, config)
    found = errors(weights, seen, config)
    assert found["network"] < found["opt"] - 0.02
    sure = whole[whole[:, 0] > 0.8]
    assert np.mean(router.gain(weights, sure) - (sure[:, 1] - sure[:, 0])) > 0.2


def test_training_finds_where_the_drafter_is_worth_more():
    """A drafter that is better than its verifier where it is sure, and worse elsewhere."""
    config = RouterConfig("toy", "toy.json", "toy", method="learned_mixture", steps=200)
    whole = RNG.random((8_000, len(FEATURES))).astype(np.float32)
    sure = whole[:, 0] > 0.5
    chances = np.stack([np.where(sure, 0.8, 0.1), np.where(sure, 0.4, 0.6)], axis=1).astype(np.float32)
    seen = Observed(whole, np.zeros(len(whole)), chances, np.zeros(len(whole)))
    worth = prices(seen)
    for n, alpha in enumerate(ALPHAS):  # the best constant weight at its price
        near = [mixture_loss(np.full(len(whole), alpha + off), worth[n], seen) for off in (-0.02, 0, 0.02)]
        assert worth[n] == 0 or near[1] <= min(near) + 1e-6
    weights = fit(seen, config)
    found = errors(weights, seen, config)
    assert found["network"] < found["mixture"] - 0.02
    weight = router.drafters_weight(weights, whole, 0.5)
    assert weight[whole[:, 0] > 0.6].min() > weight[whole[:, 0] < 0.4].max()


@pytest.mark.full
def test_a_file_decodes_by_its_network(tmp_path):
    path = tmp_path / "router.json"
    path.write_text(router.described(WEIGHTS, pair="toy"))
    options = {"method": "router", "alpha": 0.3, "temperature": 1.0}
    texts = [[o.tokens for o in cascade.generate(["1", "12", "20"] * 4, batch_size=4, **{**options, **more})]
             for cascade, more in ((pair(router=router.load(path)), {}), (pair(), {"method": "opt"}),
                                   (pair(router=router.method_of(NOTHING)), {}))]
    assert texts[0] != texts[1] == texts[2]


def test_only_routers_files_are_read(tmp_path):
    path, options = tmp_path / "router.json", {"method": "router", "alpha": 0.3}
    path.write_text(router.described(WEIGHTS, pair="toy"))
    assert pair(router=router.load(path)).checked(Settings(), options).name == "router"
    with pytest.raises(ValueError, match="give its file with --router"):
        pair().checked(Settings(), options)
    with pytest.raises(ValueError, match="is of router: give a file of the same method"):
        pair(router=router.load(path)).checked(Settings(), {**options, "method": "learned_mixture"})
    path.write_text(router.described(WEIGHTS, "learned_mixture", pair="toy"))
    assert router.load(path).name == "learned_mixture" and router.load(path).high == 1
    good = json.loads(path.read_text())
    for damage in ({"method": "opt"}, {"bias": [1.0]}, {"out": [float("nan")] * 5}, {"features": ["x"]},
                   {"hidden": "x"}):
        path.write_text(json.dumps({**good, **damage}))
        with pytest.raises(ValueError, match="no router's file"):
            router.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        router.load(tmp_path / "none.json")


CONFIGS = {"pair": '''
from speccascade_jax.config import DecodeConfig
config = DecodeConfig(drafter={drafter!r}, verifier={verifier!r}, max_source_length=32, max_new_tokens=24)
''', "task": '''
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config
task = Task(train="", validation={data!r}, test="", max_source_length=32, max_target_length=24)
config = TrainConfig(name="tiny", output_dir="", model=T5Config(), task=task)
''', "router": '''
from speccascade_jax.commands import decode, finetune
from speccascade_jax.config import RouterConfig
config = RouterConfig("tiny", {output!r}, pair={pair!r}, task={task!r}, steps=20)
'''}


@pytest.mark.full
def test_a_config_trains_a_file_that_decodes(t5_pair, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    lines = [{"source": f"the cat {n}", "target": "a dog sings"} for n in range(40)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {name: str(tmp_path / f"{name}.py") for name in CONFIGS}
    output = str(tmp_path / "made" / "router.json")
    for name, text in CONFIGS.items():
        Path(names[name]).write_text(text.format(
            drafter=str(t5_pair / "drafter"), verifier=str(t5_pair / "verifier"), data=str(data),
            output=output, pair=names["pair"], task=names["task"]))
    assert finetune.main([f"--config={names['router']}", "--examples=32"]) == 0
    assert "texts held out, network" in capsys.readouterr().out
    assert decode.main([f"--config={names['pair']}", "--method=learned_mixture", "--text=the cat",
                        f"--output={tmp_path / 'none.jsonl'}"]) == 2
    assert "give its file with --router" in capsys.readouterr().err and not (tmp_path / "none.jsonl").exists()
    assert json.loads(Path(output).read_text())["about"]["split"] == "validation"
    assert decode.main([f"--config={names['pair']}", "--method=router", "--alpha=0.1", f"--router={output}",
                        "--text=the cat"]) == 0
    for flags, said in ((["--split=dev"], "unknown split"), (["--pair=router_of_none"], "no config"),
                        ([f"--output={output[:-5]}"], "ends in .json")):
        assert finetune.main([f"--config={names['router']}", *flags]) == 2
        assert said in capsys.readouterr().err
    assert decode.main([f"--config={names['router']}", "--text=the cat"]) == 2
    assert "trains a router; its pair is" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"examples": 0}, {"split": "dev"}, {"output": "router.txt"}, {"width": 0},
                                    {"learning_rate": float("nan")}, {"seed": -1}, {"temperatures": ()},
                                    {"temperatures": (1.0, -0.5)}, {"temperatures": (float("nan"),)},
                                    {"top_ps": (0.0,)}, {"top_ps": (1.0, 1.5)}])
def test_configs_of_nonsense_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(RouterConfig("toy", "toy.json", "toy"), **change).check()
