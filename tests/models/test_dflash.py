"""DFlash's drafters against the reference's forward pass, from folders as published.

dflash.json has what the authors' code computed for the weights of pair_in(): the logits of drafts after some
committed tokens of a text.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from member_laws import check_lossless_texts
from served_toys import check_served
from shapes import EAGLE_VERIFIER, LENGTH, SOURCE, TINY_DFLASH, TINY_T5
from tiny_models import in_blocks, random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.dflash import describe, read_config
from speccascade_jax.commands import decode
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import MASK, LanguageModel
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.block import drafting
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import dflash
from speccascade_jax.models.dflash import PRESETS, DFlashModel
from speccascade_jax.models.members import Network
from speccascade_jax.tokenizers.tokenizer import Tokenizer

REFERENCE = json.loads(Path(__file__).with_name("dflash.json").read_text())
TEXT = np.array([REFERENCE["text"]], np.int32)


def scaled(config, seed):
    made = random_checkpoint(config, seed)
    flat = {
        path: x.replace(x.get_value() * 0.25) if path[-1] in ("kernel", "embedding") else x
        for path, x in nnx.to_flat_state(made.params)
    }
    return made._replace(params=nnx.from_flat_state(flat))


def pair_in(folder):
    """The folders of a drafter and its verifier."""
    for name, config, seed in (("drafter", TINY_DFLASH, 0), ("verifier", EAGLE_VERIFIER, 1)):
        checkpoints.save(folder / name, scaled(config, seed), "huggingface")
    return [folder / "drafter", folder / "verifier"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    drafter, verifier = checkpoints.load_all(pair_in(tmp_path_factory.mktemp("pair")))
    assert drafter.model.member_of == verifier.model.member_of and drafter.params is verifier.params
    return drafter.model.member_of, jax.tree.map(jnp.asarray, drafter.params)


def masked(last, count):
    return np.array([[last, *[MASK] * count]], np.int32)


def in_programs(model):
    """The model's prefill and its drafter's extend, compiled; traced anew each time, because faults are
    planted."""
    return (
        jax.jit(lambda *given: model.prefill(*given), static_argnums=3),
        jax.jit(lambda *given: model.members[0].extend(*given)),
    )


def drafts(pair):
    """The logits of the reference's places, after all that the reference had read, and those of the place
    after them."""
    model, params = pair
    prefill, draft = in_programs(model)
    for number in REFERENCE["rounds"]:
        count, wanted = number["committed"], np.array(number["logits"])
        _, cache = prefill(params, TEXT, np.array([count], np.int32), 40)
        logits, _ = draft(params, masked(TEXT[0, count - 1], len(wanted)), cache)
        yield np.asarray(logits[0]), wanted


@pytest.mark.full
def test_drafts_are_those_of_the_reference(pair):
    """Also where the prompt is one token, so that there is nothing to read."""
    model, _ = pair
    assert isinstance(model, Network) and isinstance(model.members[0], LanguageModel)
    assert (model.config.drafter, model.config.verifier) == (TINY_DFLASH, EAGLE_VERIFIER)
    assert describe(TINY_DFLASH) == REFERENCE["drafter"]
    for logits, wanted in drafts(pair):
        np.testing.assert_allclose(logits[: len(wanted)], wanted, atol=1e-4)
        assert np.abs(logits[-1] - logits[-2]).max() > 0.01  # the bonus position has a law of its own


def late(right, self, states, cache):
    """The verifier's states are kept one position late."""
    return right(self, jnp.roll(states, 1, axis=2), cache)


def turned_back(right, config, positions):
    """Positions are counted from the beginning of the draft."""
    return right(config, positions - positions[:, :1])


def forwards(right, tokens, length, back):
    """No place sees one after it."""
    return right(tokens, length, back) & (back >= 0)


def planted(wrong, right):
    return lambda *given: wrong(right, *given)


@pytest.mark.full
@pytest.mark.parametrize(
    "place,name,wrong",
    [(dflash.DFlash, "remember", late), (dflash, "turns", turned_back), (dflash, "seen", forwards)],
)
def test_faults_would_be_seen(pair, place, name, wrong, monkeypatch):
    monkeypatch.setattr(place, name, planted(wrong, getattr(place, name)))
    assert max(np.abs(logits[: len(wanted)] - wanted).max() for logits, wanted in drafts(pair)) > 0.01


@pytest.mark.full
def test_drafts_are_those_of_the_committed_text(pair):
    """Rows of unlike lengths, prompts in chunks, and tokens that were read and rolled back."""
    model, params = pair
    text = np.random.default_rng(0).integers(2, 95, (3, 34)).astype(np.int32)
    text[:, :20] = SOURCE % 95
    begins = LENGTH - 1 + np.array([4, 0, 9])
    tokens = np.stack([masked(text[row, begin], 4)[0] for row, begin in enumerate(begins)])
    (prefill, draft), alone = in_programs(model), []
    for row, begin in enumerate(begins):
        _, cache = prefill(params, text[row : row + 1], np.array([begin + 1]), 64)
        alone.append(draft(params, tokens[row : row + 1], cache)[0][0])
    for chunk in (512, 7):
        network = dataclasses.replace(model, chunk=chunk)
        prefill, draft = in_programs(network)
        _, cache = prefill(params, text[:, :20], LENGTH, 64)
        start = np.asarray(cache.length)
        rest = np.stack([text[row, n : n + 13] for row, n in enumerate(start)])
        _, cache = in_blocks(network.members[1], params, rest, [1, 4, 8], cache)
        cache = network.roll_back(cache, jnp.asarray(begins))
        logits, after = draft(params, tokens, cache)
        np.testing.assert_allclose(logits, np.stack(alone), atol=1e-4)
        np.testing.assert_array_equal(after.length, begins)


def test_texts_are_the_verifiers(pair):
    """Greedily, in drafts of several sizes; some drafts stand."""
    model, params = pair
    rng = np.random.default_rng(1)
    prompts, length = rng.integers(2, 95, (40, 6)).astype(np.int32), rng.integers(1, 7, 40).astype(np.int32)
    drafter, verifier = model.members

    def texts(sampler, given):
        return generate(
            sampler,
            given,
            jax.random.split(jax.random.key(0), 40),
            prompts,
            length,
            SamplingOptions(0.0),
            jnp.zeros(sampler.level),
            max_new_tokens=16,
            eos_id=1,
        )

    alone = texts(Autoregressive(model.full), params["verifier"])
    for gamma in (2, 5):
        sampler = Speculative(drafting(drafter, gamma), verifier, METHODS["speculative"], gamma)
        result = texts(sampler, params)
        np.testing.assert_array_equal(result.tokens, alone.tokens)
        assert int(result.counts[1].accepted.sum()) > 0


@pytest.mark.full
def test_a_pair_is_served(gemma_vocabulary):
    """What its prompts begin with is read once."""
    verifier = dataclasses.replace(EAGLE_VERIFIER, vocab_size=352, bos_id=2)
    model = dflash.DFlashPairModel(
        dflash.DFlashPairConfig(verifier, dataclasses.replace(TINY_DFLASH, vocab_size=352))
    )
    params = jax.tree.map(jnp.asarray, model.init(0))
    limits = {"max_source_length": 16, "max_new_tokens": 8}
    cascade = Cascade(model.members, (params,) * 2, Tokenizer(gemma_vocabulary), **limits)
    config = DecodeConfig(
        drafter="dflash", verifier="verifier", block_size=model.draft_size, max_new_tokens=8
    )
    texts = ["ein zug", "zwei", "drei", "vier", "eine", "a"]
    check_served(cascade, [f"ein zug {text}" for text in texts], config, shares=True)


# ---- folders --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_pair_is_decoded_from_two_folders(gemma_vocabulary, tmp_path, capsys):
    """From the command line; a drafter needs no tokenizer, and its longest draft is what it was made for."""
    for name, config, tokenizer in (
        ("drafter", dataclasses.replace(TINY_DFLASH, vocab_size=352), None),
        ("verifier", dataclasses.replace(EAGLE_VERIFIER, vocab_size=352), gemma_vocabulary),
    ):
        checkpoints.save(
            tmp_path / name, random_checkpoint(config)._replace(tokenizer=tokenizer), "huggingface"
        )
    flags = [f"--drafter={tmp_path / 'drafter'}", f"--verifier={tmp_path / 'verifier'}", "--text=ein zug"]
    flags += ["--max-source-length=16", "--max-new-tokens=8"]
    check_lossless_texts([*flags, "--block-size=5"], capsys)
    for wrong in (["--block-size=6"], ["--method=drafter"]):
        assert decode.main([*flags, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "change,words",
    [
        ({"d_model": 40}, "hidden_size is 40, the verifier has 36"),
        ({"vocab_size": 96}, "vocab_size is 96"),
        ({"states": (1, 4)}, r"target_layer_ids is \[0, 3\], the verifier has 4 layers"),
    ],
)
def test_a_drafter_of_another_verifier_is_one_sentence(change, words, tmp_path):
    for name, config in (
        ("drafter", dataclasses.replace(TINY_DFLASH, **change)),
        ("verifier", EAGLE_VERIFIER),
    ):
        checkpoints.save(tmp_path / name, random_checkpoint(config), "huggingface")
    with pytest.raises(ValueError, match=words):
        checkpoints.load_all([tmp_path / "drafter", tmp_path / "verifier"])


def test_a_drafter_needs_its_verifier(tmp_path, capsys):
    drafter, verifier = pair_in(tmp_path)
    checkpoints.save(tmp_path / "t5", random_checkpoint(TINY_T5), "huggingface")
    for paths in ([drafter], [verifier, drafter], [drafter, tmp_path / "t5"]):
        with pytest.raises(ValueError, match="list that model's folder right after it"):
            checkpoints.load_all(paths)
    assert decode.main([f"--drafter={verifier}", f"--verifier={drafter}", "--text=a"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


USUAL = describe(TINY_DFLASH)
WRONG = [
    ({"architectures": ["DFlash2DraftModel"]}, "only DFlashDraftModel"),
    ({"model_type": "llama"}, "layers of qwen3"),
    ({"is_causal": True}, "is_causal is True"),
    ({"dflash_config": USUAL["dflash_config"] | {"output_multiplier": 0.2}}, "output_multiplier is 0.2"),
    ({"dflash_config": None}, "dflash_config is None"),
    ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is missing"),
    ({"dflash_config": USUAL["dflash_config"] | {"target_layer_ids": [2, 1]}}, "from the lowest up"),
    ({"dflash_config": USUAL["dflash_config"] | {"target_layer_ids": "1"}}, "not a list of layers"),
    ({"dflash_config": USUAL["dflash_config"] | {"mask_token_id": 97}}, "mask_token_id is 97"),
    ({"block_size": 1}, "block_size is 1"),
    ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 4}, "windows"),
]


@pytest.mark.parametrize("change,words", WRONG, ids=lambda x: str(x)[:50])
def test_what_no_drafter_can_be_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        read_config("it", USUAL | change)


def test_code_in_a_folder_is_not_run(tmp_path):
    """The published folders name code that transformers runs. A drafter is read without it; what only that
    code can read is refused."""
    drafter, _ = pair_in(tmp_path)
    (drafter / "dflash.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    content = json.loads((drafter / "config.json").read_text())
    content["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    (drafter / "config.json").write_text(json.dumps(content))
    assert checkpoints.load(drafter).model.config == TINY_DFLASH
    (drafter / "config.json").write_text(json.dumps(content | {"model_type": "muse_glimmer_assistant"}))
    with pytest.raises(ValueError, match="only DFlashDraftModel"):
        checkpoints.load(drafter)
    assert not (tmp_path / "ran").exists()


def test_presets_have_the_published_sizes():
    shapes = jax.tree.leaves(DFlashModel(PRESETS["qwen3_8b_dflash"]).abstract_params())
    assert round(sum(x.size for x in shapes) / 1e6) == 1049
