"""The baselines: exact laws and exact tokens against enumerations that share no code with them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bild_reference import bild, softmax
from toys import TableLM, chi_square, pair, sequence_law, table, transform

from speccascade_jax.baselines import BASELINES
from speccascade_jax.baselines.bild import Bild
from speccascade_jax.baselines.oracle import Oracle
from speccascade_jax.baselines.sequence import QUANTILE
from speccascade_jax.baselines.tally import Tally
from speccascade_jax.baselines.token_cascade import TokenCascade
from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.loop import Requests, generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.evaluation.rates import check_counts, check_tally
from speccascade_jax.scheduling.programs import Programs

VOCAB, EOS, STEPS, ROWS = 4, 3, 5, 200_000
FAIL_BELOW = 1e-4
TABLES = table(39, VOCAB), table(40, VOCAB)
MODEL = TableLM(VOCAB)


def run(sampler, alpha, rows=ROWS, tables=TABLES, prompts=None, steps=STEPS, eos=EOS, **options):
    """The compiled loop's generation; its counts have been checked."""
    prompts = np.ones((rows, 1), np.int32) if prompts is None else prompts
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(len(prompts)))
    result = jax.device_get(
        generate(
            sampler,
            tables,
            keys,
            prompts,
            np.full(len(prompts), prompts.shape[1], np.int32),
            SamplingOptions(**{"temperature": 1.0, **options}),
            jnp.array([alpha]),
            max_new_tokens=steps,
            eos_id=eos,
        )
    )
    assert (result.counts.emitted == result.length).all()
    check_tally(result.counts)
    return result


def token_cascade_law(alpha, cap, prompt=(1,), temperature=1.0):
    """Every text -> its probability, with the number of tokens since the verifier's last."""
    texts = {}

    def grow(text, written, mass):
        context = (0, *prompt, *text)
        q, p = (softmax(logits[context[-2], context[-1]]) for logits in TABLES)
        trusted = q.max() >= 1 - alpha and written < cap
        for token, chance in enumerate(transform(q if trusted else p, temperature)):
            longer = (*text, token)
            if chance == 0:
                continue
            if token == EOS or len(longer) == STEPS:
                texts[longer] = texts.get(longer, 0.0) + mass * chance
            else:
                grow(longer, written + 1 if trusted else 0, mass * chance)

    grow((), 0, 1.0)
    return texts


@pytest.mark.long
@pytest.mark.full(quick=["0.5-2"])
@pytest.mark.parametrize("cap", [1, 2, 10])
@pytest.mark.parametrize("alpha", [0.5, 0.6])  # q is trusted in some contexts and not in others
def test_token_cascade_follows_its_law(alpha, cap):
    for temperature in (0.5, 1.0):
        result = run(TokenCascade(Autoregressive(MODEL), MODEL, cap), alpha, temperature=temperature)
        assert chi_square(result.tokens, token_cascade_law(alpha, cap, temperature=temperature)) > FAIL_BELOW
        assert (result.counts.accepted + result.counts.deferred == result.counts.drafted).all()
        assert (result.counts.emitted == result.counts.accepted + result.counts.rounds).all()


@pytest.mark.long
def test_a_wrong_cap_is_detected():
    """Negative control: if the drafter is always trusted, only the cap matters."""
    result = run(TokenCascade(Autoregressive(MODEL), MODEL, 2), 1.0)
    assert chi_square(result.tokens, token_cascade_law(1.0, 2)) > FAIL_BELOW
    assert chi_square(result.tokens, token_cascade_law(1.0, 3)) < FAIL_BELOW


@pytest.mark.long
@pytest.mark.full
def test_biased_random_numbers_are_detected(monkeypatch):
    """Negative control: numbers that are not uniform."""
    jax.clear_caches()
    noise = loop.noise
    with monkeypatch.context() as patch:
        patch.setattr(loop, "noise", lambda *args: jax.tree.map(lambda x: x**2, noise(*args)))
        result = run(TokenCascade(Autoregressive(MODEL), MODEL, 2), 0.6)
    jax.clear_caches()
    assert chi_square(result.tokens, token_cascade_law(0.6, 2)) < FAIL_BELOW


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.6, 1.0])
def test_token_cascade_at_temperature_zero(alpha):
    result = run(TokenCascade(Autoregressive(MODEL), MODEL, 2), alpha, rows=8, temperature=0.0)
    assert {tuple(row[row >= 0].tolist()) for row in result.tokens} == set(
        token_cascade_law(alpha, 2, temperature=0.0)
    )


@pytest.mark.long
def test_oracle_follows_the_law_of_diff():
    result = run(Oracle(MODEL, MODEL), 0.03)
    law = sequence_law(TABLES, ["diff"], [0.03], (1,), steps=STEPS, eos=EOS)
    assert chi_square(result.tokens, law) > FAIL_BELOW
    assert 0 < result.counts.deferred.sum() < result.counts.emitted.sum()
    assert (
        chi_square(result.tokens, sequence_law(TABLES, ["speculative"], [0.0], (1,), steps=STEPS, eos=EOS))
        < FAIL_BELOW
    )


PROMPTS = np.array(list(itertools.product(range(6), repeat=2)), np.int32)


@pytest.mark.full(quick=["0.3-10-False", "0.4-3-True"])
@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("fallback,window", [(0.3, 10), (0.4, 3), (0.0, 2), (0.5, 1)])
def test_bild_is_the_pseudocode(fallback, window, compat):
    model = TableLM(6)
    sampler = Bild(Autoregressive(model), model, fallback, window, compat)
    seen = set()
    for seed in range(12):
        tables = table(seed, 6), table(seed, 6) + table(100 + seed, 6)
        for threshold in (0.0, 1.0, 2.0):
            result = run(sampler, threshold, tables=tables, prompts=PROMPTS, steps=12, eos=5)
            for row, prompt in enumerate(PROMPTS):
                text, calls = bild(tables, prompt.tolist(), fallback, threshold, window, 12, 5, compat)
                assert result.tokens[row, : result.length[row]].tolist() == text
                assert result.counts.rounds[row] == calls
                seen |= {
                    ("rolled back", result.counts.deferred[row] > 0),
                    ("eos", text[-1] == 5),
                    ("eos inside", 5 in text[:-1]),
                }
    assert {("rolled back", True), ("rolled back", False), ("eos", True), ("eos", False)} <= seen
    if (fallback, window) == (0.3, 10):
        assert (("eos inside", True) in seen) == compat  # C.3, item 4


def greedy(model, prompts, tables):
    keys = jax.vmap(jax.random.key)(jnp.arange(len(prompts)))
    return np.array(
        generate(
            Autoregressive(model),
            tables,
            keys,
            prompts,
            np.full(len(prompts), prompts.shape[1], np.int32),
            SamplingOptions(0.0),
            jnp.zeros(0),
            max_new_tokens=12,
            eos_id=5,
        ).tokens
    )


@pytest.mark.full
def test_bild_at_extreme_alphas():
    """alpha 0 gives the verifier's greedy text, and an unlimited alpha the drafter's after one token."""
    model, tables = TableLM(6), (table(1, 6), table(2, 6))
    for fallback, window in ((0.0, 20), (0.3, 10), (0.6, 4)):
        strict = run(
            Bild(Autoregressive(model), model, fallback, window),
            0.0,
            tables=tables,
            prompts=PROMPTS,
            steps=12,
            eos=5,
        )
        np.testing.assert_array_equal(strict.tokens, greedy(model, PROMPTS, tables[1]))
    lax = run(
        Bild(Autoregressive(model), model, 0.0, 20), np.inf, tables=tables, prompts=PROMPTS, steps=12, eos=5
    )
    first = greedy(model, PROMPTS, tables[1])[:, :1]
    np.testing.assert_array_equal(lax.tokens[:, :1], first)
    follow = greedy(model, np.concatenate([PROMPTS, first], axis=1), tables[0])[:, :11]
    follow[first[:, 0] == 5] = -1
    np.testing.assert_array_equal(lax.tokens[:, 1:], follow)


@pytest.mark.full
@pytest.mark.parametrize(
    "method,alpha", [("sequence", 0.9), ("sequence_mean", 0.75), ("sequence_quantile", 0.75)]
)
def test_sequence_cascades_follow_their_law(method, alpha):
    """q(text) if q is confident in the text, else the verifier's law, whatever the drafter wrote."""
    outputs = list(
        pair().generate(["1"] * 60_000, method=method, alpha=alpha, temperature=1.0, batch_size=10_000)
    )
    prompt = (1, EOS)
    law = functools.partial(sequence_law, methods=[], alphas=[], prompt=prompt, steps=3, eos=EOS)
    small, large = law([TABLES[0]]), law([TABLES[1]])

    def confidence(text):
        context = (*prompt, *text)
        log_q = np.array(
            [np.log(softmax(TABLES[0][context[n], context[n + 1]])[token]) for n, token in enumerate(text)]
        )
        return {
            "sequence": np.exp(log_q.sum()),
            "sequence_mean": np.exp(log_q.mean()),
            "sequence_quantile": np.exp(np.quantile(log_q, QUANTILE)),
        }[method]

    deferred = {text: mass for text, mass in small.items() if confidence(text) < 1 - alpha}
    mass = sum(deferred.values())
    assert 0.1 < mass < 0.9
    expected = {
        text: (0.0 if text in deferred else small.get(text, 0.0)) + mass * large.get(text, 0.0)
        for text in {*small, *large}
    }
    texts = np.array([o.tokens + [-1] * (3 - len(o.tokens)) for o in outputs])
    assert chi_square(texts, expected) > FAIL_BELOW
    assert [o.index for o in outputs] == list(range(60_000))
    check_counts([o.counts for o in outputs], [len(o.tokens) for o in outputs])


@pytest.mark.full
def test_sharing_a_random_number_between_both_texts_is_detected(monkeypatch):
    """Negative control: the verifier's text drawn with the drafter's numbers does not follow the law."""
    monkeypatch.setattr("speccascade_jax.inference.text.REWRITTEN", 0)
    with pytest.raises(AssertionError):
        test_sequence_cascades_follow_their_law("sequence", 0.9)


def test_only_deferred_rows_reach_the_verifier(monkeypatch):
    cascade, rows = pair(), []
    real = Programs.call

    def spy(self, program, *arguments):
        rows.extend(
            (self.plan.sampler, int(np.sum(asked.input_length > 0)))
            for asked in arguments
            if isinstance(asked, Requests)
        )
        return real(self, program, *arguments)

    monkeypatch.setattr(Programs, "call", spy)
    outputs = list(
        cascade.generate(
            ["1", "12", "", "2", "21", "0"] * 8, method="sequence", alpha=0.9, temperature=1.0, batch_size=6
        )
    )
    verified = [size for sampler, size in rows if isinstance(sampler, Autoregressive)]
    deferred = sum(o.counts.get("rounds", 0) > 0 for o in outputs)
    assert 0 < deferred < 40 and sum(verified) == deferred
    assert verified[0] == 6  # gathered into full batches
    assert outputs[2].counts == {} and outputs[2].tokens == []


@pytest.mark.full
@pytest.mark.parametrize("method", BASELINES)
def test_rows_depend_neither_on_batch_nor_on_slot(method):
    texts, temperature = ["1", "12", "2", "21", "0", "1"], 0.0 if BASELINES[method].greedy else 1.0
    options = {"method": method, "alpha": 0.7, "temperature": temperature}
    together = [o.tokens for o in pair().generate(texts, batch_size=6, **options)]
    assert together == [o.tokens for o in pair().generate(texts, **options)]
    assert together[3:] == [
        o.tokens for o in pair().generate(texts[3:], first_index=3, batch_size=2, **options)
    ]
    assert list(pair().stream("12", index=1, **options))[-1] == "".join(map(str, together[1]))


@pytest.mark.full(quick=["sequence"])
@pytest.mark.parametrize("method", BASELINES)
def test_limits_equal_the_models_alone(method):
    """alpha 0: the verifier (or nearly); alpha 1: the drafter. Greedy, the whole API."""

    def tokens(**options):
        return [o.tokens for o in pair().generate(["1", "12", "2", "0"], batch_size=4, **options)]

    if BASELINES[method].confidence or method in ("token_cascade", "oracle"):
        assert tokens(method=method, alpha=1.0) == tokens(method="drafter")
    if method not in ("bild_compat", "oracle"):
        assert tokens(method=method, alpha=0.0) == tokens(method="verifier")


@pytest.mark.full
def test_a_sweep_compiles_once():
    cascade = pair()
    for method in ("token_cascade", "oracle", "sequence"):
        for alpha, temperature in itertools.product((0.2, 0.5, 0.9), (0.0, 1.0)):
            list(cascade.generate(["12"], method=method, alpha=alpha, temperature=temperature))
    assert cascade.clock.compilations == 8  # begin and run of each; the sequence cascade has two samplers


def test_bild_refuses_to_sample():
    with pytest.raises(FieldError) as refused:
        list(pair().generate(["1"], method="bild", alpha=1.0, temperature=1.0))
    assert (refused.value.field, refused.value.value) == ("temperature", 1.0)


def test_names_are_distinct():
    assert not METHODS.keys() & BASELINES.keys()


def test_a_broken_tally_is_detected():
    good = Tally(*(np.array([n]) for n in (5, 1, 4, 4, 0, 5)))
    check_tally(good)
    for broken in (good._replace(emitted=good.emitted + 1), good._replace(drafted=good.drafted - 1)):
        with pytest.raises(ValueError, match="do not fit"):
            check_tally(broken)
