"""Three models and one in the text API. The law tests are in tests/core."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import SENTENCES
from flax import nnx

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.rules import METHODS
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.exits import ExitsConfig, ExitsModel
from speccascade_jax.models.members import Member
from speccascade_jax.models.shared_encoder import SharedEncoderConfig, SharedEncoderModel
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.planning.readings import reading
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import Tokenizer, pad

LIMITS = {"max_source_length": 32, "max_new_tokens": 24}
ORDER = "drafter", "middle", "verifier"


@pytest.fixture(scope="module")
def three(t5_pair):
    return Cascade.load(*(t5_pair / name for name in ORDER), **LIMITS)


@pytest.fixture(scope="module")
def pair(t5_pair):
    return Cascade.load(t5_pair / "drafter", t5_pair / "verifier", **LIMITS)


def tokens(cascade, **options):
    return [output.tokens for output in cascade.generate(SENTENCES, **options)]


@pytest.mark.parametrize(
    "hand_over",
    ["need", pytest.param("truncate", marks=pytest.mark.full), pytest.param("keep", marks=pytest.mark.full)],
)
def test_greedy_hierarchies_write_the_verifiers_tokens(three, hand_over):
    alone, batch_size = tokens(three, method="verifier"), 6 if hand_over == "keep" else 1
    assert tokens(three, block_size=(3, 2), batch_size=batch_size, hand_over=hand_over) == alone


def test_counts_of_every_level(three):
    for output in three.generate(SENTENCES, block_size=(2, 4), temperature=1.0):
        [base, middle], top = output.counts["below"], output.counts
        assert top["emitted"] == len(output.tokens) == len(output.level)
        assert sum(middle["histogram"]) == middle["rounds"] and sum(top["histogram"]) == top["rounds"]
        assert middle["emitted"] >= top["drafted"] >= top["accepted"]  # all that is verified was handed over
        assert base["passes"] == output.counts["drafter_passes"] >= middle["drafted"]
        written = np.bincount(output.level, minlength=3)
        assert written[2] == output.origin.count("correction") + output.origin.count("bonus")
        assert written[0] + written[1] == top["accepted"] == output.origin.count("draft")
        assert written[0] <= middle["accepted"]


@pytest.mark.full
def test_every_level_writes(three):
    levels = [
        level
        for output in three.generate(SENTENCES, block_size=(2, 4), temperature=1.0)
        for level in output.level
    ]
    assert set(levels) == {0, 1, 2}


@pytest.mark.full
def test_levels_of_a_pair_and_of_one_model(pair):
    for output in pair.generate(SENTENCES[:3], temperature=1.0):
        assert output.level == [int(origin != "draft") for origin in output.origin]
    for method, level in (("verifier", 0), ("token_cascade", None), ("sequence", None)):
        for output in pair.generate(SENTENCES[:3], method=method, alpha=0.5 if level is None else 0.0):
            assert output.level == [level if level is not None else int(o != "draft") for o in output.origin]


@pytest.mark.full
def test_one_value_applies_to_all_levels(three):
    each = tokens(three, method=("opt", "opt"), alpha=(0.3, 0.3), block_size=(3, 3), temperature=1.0)
    assert each == tokens(three, method="opt", alpha=0.3, block_size=3, temperature=1.0)
    assert each == tokens(three, method="opt+opt", alpha=0.3, block_size=3, temperature=1.0)
    assert each == tokens(three, method=(METHODS["opt"], "opt"), alpha=0.3, block_size=3, temperature=1.0)
    assert each != tokens(three, method="speculative+opt", alpha=0.3, block_size=3, temperature=1.0)


@pytest.mark.full
def test_rows_of_a_batch_follow_their_own_levels(three):
    settings = [
        Settings(method=method, alpha=alpha, block_size=(2, 3), temperature=1.0)
        for method, alpha in (
            ("speculative", 0.0),
            ("opt", (0.0, 0.3)),
            ("speculative+token_v3", 0.4),
            ("chow+speculative", (0.5, 0.0)),
        )
    ]
    together = list(three.generate(SENTENCES[:4], settings, batch_size=4))
    for n, (text, row_settings) in enumerate(zip(SENTENCES[:4], settings, strict=True)):
        [alone] = three.generate([text], row_settings, first_index=n)
        assert (together[n].tokens, together[n].counts) == (alone.tokens, alone.counts)


@pytest.mark.full
def test_streaming_a_hierarchy(three):
    settings = Settings(block_size=(2, 3), temperature=1.0)
    [output] = three.generate(SENTENCES[:1], settings)
    assert list(three.stream(SENTENCES[0], settings))[-1] == output.text


def test_one_model_is_a_cascade_of_one(pair, t5_pair):
    cascade = Cascade.load(t5_pair / "verifier", **LIMITS)
    assert tokens(cascade) == tokens(pair, method="verifier")
    assert tokens(cascade, method="drafter", temperature=1.0) == tokens(cascade, temperature=1.0)


@pytest.mark.parametrize(
    "options,field,value",
    [
        ({"block_size": (2, 3, 4)}, "block_size", (2, 3, 4)),
        ({"alpha": (0.1,) * 3, "method": "opt"}, "alpha", (0.1,) * 3),
        ({"method": ("opt", "opt", "opt")}, "method", ("opt", "opt", "opt")),
        ({"method": ("opt", "bild")}, "method", "bild"),
        ({"method": "opt+verifier"}, "method", "verifier"),
        ({"method": "token_cascade"}, "method", "token_cascade"),
        ({"method": "opt+nothing"}, "method", "nothing"),
        ({"method": "opt", "alpha": (0.1, -1.0)}, "alpha", -1.0),
        ({"block_size": (2, 0)}, "block_size", 0),
        ({"block_size": "adaptive"}, "block_size", "adaptive"),
    ],
)
def test_values_that_do_not_match_the_levels_are_refused(three, options, field, value):
    with pytest.raises(FieldError) as refused:
        three.generate(SENTENCES, **options)
    assert (refused.value.field, refused.value.value) == (field, value)


def test_rules_need_two_models(t5_pair):
    cascade = Cascade.load(t5_pair / "verifier", **LIMITS)
    with pytest.raises(FieldError) as refused:
        cascade.generate(SENTENCES, method="opt")
    assert (refused.value.field, refused.value.value) == ("method", "opt")


def test_incompatible_models_are_refused(t5_pair):
    def refused(work):
        with pytest.raises(FieldError) as error:
            work()
        return error.value.field, error.value.value

    assert refused(Cascade.load) == ("models", ())
    assert refused(lambda: DecodeConfig(drafter="a")) == ("models", ())
    run = DecodeConfig(models=tuple(str(t5_pair / name) for name in ORDER), block_size=(1, 2, 3))
    assert refused(run.check) == ("block_size", (1, 2, 3))
    two = dataclasses.replace(run, block_size=2)
    assert refused(dataclasses.replace(two, hand_over="some").check) == ("hand_over", "some")
    run = dataclasses.replace(two, models=("missing", *two.models[1:]))
    assert refused(lambda: Cascade.from_config(run)) == ("models", "missing")


T5 = T5Config(
    vocab_size=320, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_encoder_layers=1, num_decoder_layers=3
)
DRAFTER = dataclasses.replace(T5, num_encoder_layers=0, num_decoder_layers=1)
NETWORKS = {
    "exits": ExitsModel(ExitsConfig(T5, (1, 2))),
    "shared encoder": SharedEncoderModel(SharedEncoderConfig(T5, DRAFTER)),
}


@dataclasses.dataclass(frozen=True)
class Alone:
    """A member with a cache that no other member reads."""

    member: Member

    @property
    def vocab_size(self):
        return self.member.vocab_size

    def prefill(self, *arguments):
        return self.member.prefill(*arguments)

    def extend(self, *arguments):
        return self.member.extend(*arguments)

    def roll_back(self, *arguments):
        return self.member.roll_back(*arguments)


@pytest.mark.full
@pytest.mark.parametrize(
    "hand_over,temperature",
    [("need", 0.0), ("truncate", 0.0), ("keep", 1.0)],
)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_members_of_a_network_draft_for_each_other(network, hand_over, temperature, spiece):
    """They write what copies of them write that share nothing, and at temperature 0 the full model's text."""
    params = network.init(0)
    members, count = network.members, len(network.members)
    together = Cascade(members, (params,) * count, Tokenizer(spiece), **LIMITS)
    settings = {"block_size": (2, 3)[-count + 1 :], "hand_over": hand_over, "temperature": temperature}
    sampler, nest = together.sampler(Settings(**settings))
    assert sampler.models == network and nest is params  # held once
    apart = Cascade(tuple(map(Alone, members)), (params,) * count, Tokenizer(spiece), **LIMITS)
    outputs = tokens(together, **settings)
    assert outputs == tokens(apart, **settings)
    if temperature == 0:
        assert outputs == tokens(together, method="verifier")


@pytest.mark.full
def test_a_drafter_that_reads_states(spiece):
    """It drafts from what the verifier made of the text so far: other drafts than without, the same texts.
    A plan takes its acceptances from rounds, too."""
    network = SharedEncoderModel(SharedEncoderConfig(T5, DRAFTER, states=True))
    params = network.init(0)
    kernel = params["states"]["kernel"]
    params["states"]["kernel"] = kernel.replace(
        jnp.asarray(0.3 * np.random.default_rng(0).standard_normal(kernel.shape, np.float32))
    )
    blind = nnx.from_flat_state(
        {path: 0 * x if path[0] == "states" else x for path, x in nnx.to_flat_state(params)}
    )
    sees, not_ = (
        Cascade(network.members, (weights,) * 2, Tokenizer(spiece), **LIMITS) for weights in (params, blind)
    )
    alone = tokens(sees, method="verifier")
    assert alone == tokens(sees, block_size=3) == tokens(sees, block_size=3, batch_size=4)
    outputs = list(sees.generate(SENTENCES[:3], method="verifier"))
    acceptance, without = (
        reading(cascade, outputs, Settings(temperature=1.0), 4).acceptance for cascade in (sees, not_)
    )
    assert acceptance[1, 1] == pytest.approx(1) and abs(acceptance[0, 1] - without[0, 1]) > 1e-5
    source, length = pad(sees.encode(SENTENCES[:3])[0], 32, 0)
    target, count = pad([output.tokens for output in outputs], 24, 0)
    laws = [jax.nn.softmax(x) for x in jax.jit(network.forced_members)(params, source, length, target)]
    overlap = np.asarray(jnp.minimum(*laws).sum(axis=-1))[np.arange(24) < count[:, None]].mean()
    assert acceptance[0, 1] == pytest.approx(overlap, abs=1e-5)


def test_members_must_be_in_order(spiece):
    network = NETWORKS["exits"]
    params, other, (small, middle, full) = object(), object(), network.members
    for models, held, said in (
        ((middle, small, full), (params,) * 3, "member 2 comes before member 1"),
        ((small, small), (params,) * 2, "member 1 comes before member 1"),
        ((small, full), (params, other), "two networks of one shape cannot be combined"),
        ((small, T5Model(T5), full), (params, other, params), "must be adjacent"),
    ):
        with pytest.raises(ValueError, match=said):
            Cascade(models, held, Tokenizer(spiece), **LIMITS)
