"""Drafters that write several tokens at once, in the text API and the commands."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from corpora import SENTENCES
from served_toys import check_served

from speccascade_jax import checkpoints
from speccascade_jax import config as configs
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.commands import decode, plan
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import states_law
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Speculative
from speccascade_jax.core.samplers.adaptive import Adaptive
from speccascade_jax.core.samplers.block import Parallel
from speccascade_jax.core.samplers.lookup import Lookup
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import BlockDrafterConfig, model_of
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import Tokenizer

LIMITS = {"max_source_length": 32, "max_new_tokens": 24}
T5 = T5Config(
    vocab_size=320, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_encoder_layers=1, num_decoder_layers=3
)
CONFIG = BlockDrafterConfig(T5, (1, 3), 6, num_heads=4, d_kv=8, d_ff=48)
NETWORK = model_of(CONFIG)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, NETWORK.init(0))


@pytest.fixture(scope="module")
def cascade(params, spiece):
    return Cascade(NETWORK.members, (params,) * 2, Tokenizer(spiece), **LIMITS)


def tokens(cascade, **options):
    return [output.tokens for output in cascade.generate(SENTENCES, **options)]


@pytest.mark.full
def test_greedy_texts_are_the_verifiers(cascade, params, spiece, full):
    """In fixed and adaptive blocks, in batches, and with a third model above."""
    alone = tokens(cascade, method="verifier")
    assert tokens(cascade, block_size=6) == tokens(cascade, block_size=3, batch_size=4) == alone
    assert tokens(cascade, block_size="adaptive", max_block_size=5, batch_size=3) == alone
    outputs = list(cascade.generate(SENTENCES, block_size=3))
    assert all(output.counts["drafter_passes"] == output.counts["rounds"] for output in outputs)
    if full:
        large = T5Model(dataclasses.replace(T5, num_decoder_layers=1))
        large_params = large.init(5)
        three = Cascade(
            (*NETWORK.members, large), (params, params, large_params), Tokenizer(spiece), **LIMITS
        )
        alone = tokens(three, method="verifier")
        for hand_over in ("need", "truncate", "keep"):
            assert tokens(three, block_size=(3, 4), batch_size=3, hand_over=hand_over) == alone


@pytest.mark.full
def test_a_text_does_not_depend_on_its_batch(cascade):
    """Nor on the rules and truncations of other rows."""
    settings = [
        Settings(method=method, alpha=alpha, temperature=1.0, block_size=4, top_p=top_p)
        for method, alpha, top_p in (("speculative", 0.0, 1.0), ("opt", 0.05, 0.9), ("token_v3", 0.3, 1.0))
    ]
    together = list(cascade.generate(SENTENCES[:3], settings, batch_size=3))
    for n, (text, row_settings) in enumerate(zip(SENTENCES[:3], settings, strict=True)):
        [alone] = cascade.generate([text], row_settings, first_index=n)
        assert (together[n].tokens, together[n].counts) == (alone.tokens, alone.counts)


def test_which_sampler_decodes_block_drafters(cascade):
    sampler, nest = cascade.sampler(Settings(block_size=4))
    assert type(sampler) is Speculative and sampler.drafter == Parallel(NETWORK.members[0], 5)
    assert sampler.models == NETWORK and nest is cascade.params[0]
    sampler, _ = cascade.sampler(Settings(block_size="adaptive", max_block_size=6))
    assert isinstance(sampler, Adaptive) and isinstance(sampler.drafter, Parallel)
    assert not states_law(sampler, [METHODS["opt"]]) and states_law(sampler, [METHODS["speculative"]])


@pytest.mark.parametrize(
    "options,field,value",
    [
        ({"block_size": 7}, "block_size", 7),
        ({"block_size": "adaptive"}, "max_block_size", 12),
        ({"method": "drafter"}, "method", "drafter"),
        ({"method": "bild"}, "method", "bild"),
        ({"method": "token_cascade"}, "method", "token_cascade"),
    ],
)
def test_unsupported_settings_of_block_drafters_are_refused(cascade, options, field, value):
    with pytest.raises(FieldError) as refused:
        cascade.generate(SENTENCES, **options)
    assert (refused.value.field, refused.value.value) == (field, value)


def test_incompatible_models_are_refused(params, spiece):
    drafter, verifier = NETWORK.members
    other = T5Model(T5)
    for models in ((drafter,), (drafter, other), (other, drafter, verifier)):
        held = tuple(params for _ in models)
        with pytest.raises(ValueError, match="drafts several tokens at once"):
            Cascade(models, held, Tokenizer(spiece), **LIMITS)
    network = Cascade((NETWORK, NETWORK), (params, params), Tokenizer(spiece), **LIMITS)
    assert network.levels == 1  # as in training, where it is the verifier
    with pytest.raises(FieldError) as refused:
        Cascade(
            (drafter, verifier),
            (params, params),
            Tokenizer(spiece),
            beside=Lookup(T5.vocab_size, 0),
            **LIMITS,
        )
    assert refused.value.field == "models"


@pytest.mark.full
def test_it_is_served(cascade):
    """A row's draft has as many masks as it asked for, whatever the server's longest draft has."""
    config = DecodeConfig(drafter="block", verifier="block", block_size=5, max_new_tokens=12)
    check_served(cascade, [*SENTENCES, "the old tree"], config)


@pytest.fixture(scope="module")
def folder(params, spiece, tmp_path_factory):
    """The folder of the drafter, next to its verifier's."""
    folder = tmp_path_factory.mktemp("block")
    verifier = Checkpoint(NETWORK.full, params["verifier"], spiece, "memory")
    checkpoints.save(folder / "verifier", verifier, "huggingface")
    checkpoints.native.export(folder / "drafter", NETWORK, params, full_at="verifier")
    (folder / "drafter" / "spiece.model").write_bytes(spiece.read_bytes())
    return folder / "drafter"


@pytest.mark.full
def test_the_command_line_decodes_with_it(folder, capsys):
    """From a folder next to the verifier's; what it cannot do is one sentence."""
    flags = ["--max-source-length=16", "--max-new-tokens=8", "--text=Ein Zug"]
    pair = [f"--drafter={folder}@drafter", f"--verifier={folder}"]
    texts = []
    for method in ("speculative", "verifier"):
        assert decode.main([*flags, *pair, f"--method={method}"]) == 0
        texts.append(capsys.readouterr().out.splitlines()[:2])
    assert texts[0] == texts[1]
    for wrong in (
        [*pair, "--block-size=7"],
        [*pair, "--method=drafter"],
        [pair[0], f"--verifier={folder.parent / 'verifier'}"],
    ):
        assert decode.main([*flags, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.full
def test_a_plan_of_it(folder, tmp_path, capsys):
    """Timed by passes, in drafts that are no longer than it can write; the written config decodes."""
    text, out = tmp_path / "texts.txt", tmp_path / "planned.py"
    text.write_text("\n".join(SENTENCES[:3]))
    flags = ["--models", f"{folder}@drafter", str(folder)]
    flags += ["--max-source-length=16", "--max-new-tokens=8", f"--input={text}"]
    assert plan.main([*flags, "--repetitions=1", "--check", f"--output={out}"]) == 0
    assert "up to 6" in capsys.readouterr().out
    planned = configs.load(out)
    assert planned.models[-1] == str(folder) and len(planned.models) <= 2
    [output] = Cascade.from_config(planned).generate(SENTENCES[:1], planned.settings)
    [alone] = Cascade.load(folder, max_source_length=16, max_new_tokens=8).generate(SENTENCES[:1])
    assert output.tokens == alone.tokens


def test_plans_that_a_block_drafter_cannot_join_are_refused(cascade, params, spiece):
    """Chains that would separate it from its verifier, and acceptance files for other machines."""
    large = T5Model(dataclasses.replace(T5, num_decoder_layers=1))
    three = Cascade((*NETWORK.members, large), (*cascade.params, large.init(5)), Tokenizer(spiece), **LIMITS)
    arguments = plan.Arguments(configs.load("demo"), acceptance_to="a.json")
    for models, names, field in ((three, ("a", "b", "c"), "models"), (cascade, ("a", "b"), "acceptance_to")):
        with pytest.raises(FieldError) as refused:
            plan.check_members(arguments, models, names)
        assert refused.value.field == field
    plan.check_members(dataclasses.replace(arguments, acceptance_to=None), cascade, ("a", "b"))
