"""Gemma 4's assistants against transformers': what they draft, round by round, and the texts of a pair."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from member_laws import check_lossless_texts
from shapes import LENGTH, SOURCE, TINY_ASSISTANT, TINY_GEMMA4
from tiny_models import prefill, random_checkpoint, transformers_gemma4

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.assistant import describe, read_config
from speccascade_jax.commands import decode
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import assistant
from speccascade_jax.models.assistant import PRESETS, AssistantModel, AssistedConfig, AssistedModel
from speccascade_jax.models.members import Network

TOKENS = 6  # so few that drafts of random weights stand now and then
DRAFTS, ROUNDS = 3, 6
SHARED = dataclasses.replace(TINY_GEMMA4, vocab_size=TOKENS)
DENSE = dataclasses.replace(
    SHARED, num_readers=None, wide_readers=False, per_layer_width=None, num_layers=3, local=(1, 1, 0)
)
PLAIN = dataclasses.replace(TINY_ASSISTANT, vocab_size=TOKENS)
ORDERED = dataclasses.replace(PLAIN, num_centroids=3, active_centroids=2)
PAIRS = {"all tokens": (PLAIN, DENSE), "ordered embeddings": (ORDERED, SHARED)}
PROMPTS = SOURCE % TOKENS


@pytest.fixture
def repaired(monkeypatch):
    """transformers 5.23 without its faults: no assistant can be made, a verifier that shares no keys and
    values hands none over, those of rejected tokens are handed over, and local layers see more than the
    window. Returns a list, to which every draft is added."""
    transformers = pytest.importorskip("transformers")
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    def modes(self):
        count = self.num_hidden_layers - self.num_kv_shared_layers
        roles, kinds = [None] * count, self.layer_types[:count]
        for kind in set(kinds):
            roles[count - 1 - kinds[::-1].index(kind)] = "store"
        return roles + ["reuse"] * self.num_kv_shared_layers

    drafts, original = [], SinglePositionMultiTokenCandidateGenerator.get_candidates

    def candidates(self, input_ids, *, model_outputs, is_first_iteration, **more):
        if not is_first_iteration:
            read, held = input_ids.shape[1] - 1, model_outputs.shared_kv_states
            rejected = held["full_attention"][0].shape[2] - read
            window = self.assistant_model.config.text_config.sliding_window
            begins = {"full_attention": 0, "sliding_attention": window - 1}
            model_outputs.shared_kv_states = {
                kind: tuple(x[:, :, : x.shape[2] - rejected][:, :, -begins[kind] :] for x in both)
                for kind, both in held.items()
            }
        output = original(
            self, input_ids, model_outputs=model_outputs, is_first_iteration=is_first_iteration, **more
        )
        if not is_first_iteration:
            drafts.append(output[0][0, input_ids.shape[1] :].tolist())
        return output

    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(modes))
    monkeypatch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", candidates)
    return drafts


def pair_of(folder, configs, drafts):
    """A pair's folders as transformers writes them, and for each of PROMPTS the text and the drafts that
    transformers makes."""
    torch = pytest.importorskip("torch")
    drafter, verifier = (transformers_gemma4(config, seed) for seed, config in enumerate(configs))
    drafter.save_pretrained(folder / "drafter")
    verifier.save_pretrained(folder / "verifier")
    drafter.generation_config.num_assistant_tokens = DRAFTS
    outputs = []
    for row, length in zip(PROMPTS, LENGTH, strict=True):
        prompt = torch.tensor(row[None, :length].astype(np.int64))
        drafts.clear()
        text = verifier.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=ROUNDS * (DRAFTS + 1) + 2,
            eos_token_id=-1,
            pad_token_id=0,
        )
        outputs.append((text[0, length:].tolist(), list(drafts)))
    return outputs


def drafted(model, params, texts, lengths):
    """What the assistant drafts, in ROUNDS rounds of all texts at once, after each text's first `lengths`
    tokens; and how many of the drafts stand."""
    draft, read = (jax.jit(lambda *given, member=member: member.extend(*given)) for member in model.members)
    _, cache = prefill(model, params, texts, lengths, 64)
    last, rows = texts[np.arange(len(texts)), lengths - 1], []
    for _ in range(ROUNDS):
        tokens, start = [last], np.asarray(cache.length)
        for _ in range(DRAFTS):
            logits, cache = draft(params, tokens[-1][:, None], cache)
            tokens.append(np.asarray(jnp.argmax(logits[:, 0], axis=-1)))
        logits, cache = read(params, np.stack(tokens, axis=1), cache)
        choice, block = np.asarray(jnp.argmax(logits, axis=-1)), np.stack(tokens[1:], axis=1)
        stand = np.cumprod(block == choice[:, :-1], axis=1).sum(axis=1)
        cache = model.roll_back(cache, start + stand + 1)
        last = choice[np.arange(len(texts)), stand]
        rows.append((block, stand))
    return np.stack([block for block, _ in rows], axis=1), np.stack([stand for _, stand in rows], axis=1)


def late(draft, self, tokens, cache):
    """The verifier's states are read one position late."""
    rolled = cache._replace(states=jnp.roll(cache.states, 1, axis=-2))
    logits, cache = draft(self, tokens, rolled)
    return logits, cache._replace(states=jnp.roll(cache.states, -1, axis=-2))


def advancing(draft, self, tokens, cache):
    """The assistant's position advances with the draft."""
    length, keys = cache.verifier.length, cache.verifier._replace(length=cache.drafted)
    logits, cache = draft(self, tokens, cache._replace(verifier=keys))
    return logits, cache._replace(verifier=cache.verifier._replace(length=length))


def seeing_rejected(kinds_of, config, positions, back):
    """The key at the last committed token's position, which a rejected token has left there, is seen."""
    return kinds_of(config, positions, positions[..., None] - jnp.arange(back.shape[-1]))


def planted(wrong, right):
    return lambda *given: wrong(right, *given)


FAULTS = (
    (assistant.Assisted, "draft", late),
    (assistant.Assisted, "draft", advancing),
    (assistant, "kinds_of", seeing_rejected),
)


def loaded(folder):
    drafter, verifier = checkpoints.load_all([folder / "drafter", folder / "verifier"])
    assert drafter.model.member_of == verifier.model.member_of and drafter.params is verifier.params
    return drafter.model.member_of, drafter.params


@pytest.mark.full(quick=["ordered embeddings"])
@pytest.mark.parametrize("configs", PAIRS.values(), ids=PAIRS)
def test_drafts_are_those_of_transformers_round_by_round(configs, repaired, tmp_path):
    """Three texts of unlike lengths at once here. transformers reads the prompt and writes one token before
    it drafts. Then with planted faults."""
    theirs = pair_of(tmp_path, configs, repaired)
    model, params = loaded(tmp_path)
    assert isinstance(model, Network) and isinstance(model.members[0], LanguageModel)
    assert (model.config.drafter, model.config.verifier) == configs
    lengths = LENGTH + 1
    texts = np.zeros((3, 21), np.int32)
    for row, (length, (text, _)) in enumerate(zip(LENGTH, theirs, strict=True)):
        texts[row, : length + 1] = [*PROMPTS[row, :length], text[0]]
    tokens, stand = drafted(model, params, texts, lengths)
    expected = np.array([drafts[:ROUNDS] for _, drafts in theirs])
    np.testing.assert_array_equal(tokens, expected)
    assert 0 < stand.sum() < stand.size * DRAFTS and len(np.unique(tokens)) > 2

    for place, name, wrong in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, planted(wrong, getattr(place, name)))
            assert (drafted(model, params, texts, lengths)[0] != expected).any(), wrong.__name__


@pytest.mark.full
def test_a_pair_writes_the_texts_of_its_verifier(repaired, tmp_path):
    """Greedy texts of three unlike rows, with the tokens a call that transformers needs."""
    theirs = pair_of(tmp_path, PAIRS["ordered embeddings"], repaired)
    model, params = loaded(tmp_path)
    drafter, verifier = model.members
    keys, options = jax.random.split(jax.random.key(0), 3), SamplingOptions(0.0)
    sampler = Speculative(Autoregressive(drafter), verifier, METHODS["speculative"], DRAFTS)
    result, alone = (
        generate(
            sampler,
            given,
            keys,
            PROMPTS,
            LENGTH,
            options,
            jnp.zeros(sampler.level),
            max_new_tokens=20,
            eos_id=-1,
        )
        for sampler, given in ((sampler, params), (Autoregressive(model.full), params["verifier"]))
    )
    np.testing.assert_array_equal(result.tokens, alone.tokens)
    np.testing.assert_array_equal(result.tokens, [text[:20] for text, _ in theirs])
    assert 0 < int(result.counts[1].accepted.sum()) < int(result.counts[1].drafted.sum())


@pytest.mark.full
def test_a_prompt_of_one_token_hides_what_is_in_the_buffers():
    """Nothing is committed yet that an assistant could read: its first draft is the same whatever the other
    rows' prompts have left there, and however long the buffers are."""
    model = AssistedModel(AssistedConfig(TINY_GEMMA4, TINY_ASSISTANT))
    params, logits = random_checkpoint(model.config).params, []

    def first(params, source, size):
        _, cache = model.prefill(params, source, np.array([1], np.int32), size)
        return model.members[0].extend(params, source[:, :1], cache)[0]

    for width, size in ((1, 8), (5, 24)):
        source = np.arange(7, 7 + width, dtype=np.int32)[None]
        logits.append(jax.jit(first, static_argnums=2)(params, source, size))
    np.testing.assert_allclose(*logits, atol=1e-5)


# ---- folders --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_pair_is_decoded_from_two_folders(gemma_vocabulary, tmp_path, capsys):
    """From the command line; an assistant needs no tokenizer."""
    verifier = dataclasses.replace(TINY_GEMMA4, vocab_size=352)
    drafter = dataclasses.replace(TINY_ASSISTANT, vocab_size=352, num_centroids=11, active_centroids=4)
    for name, config, tokenizer in (("drafter", drafter, None), ("verifier", verifier, gemma_vocabulary)):
        made = random_checkpoint(config)._replace(tokenizer=tokenizer)
        checkpoints.save(tmp_path / name, made, "huggingface")
    flags = [f"--drafter={tmp_path / 'drafter'}", f"--verifier={tmp_path / 'verifier'}", "--text=ein zug"]
    flags += ["--max-source-length=16", "--max-new-tokens=8"]
    check_lossless_texts(flags, capsys)


def folders(folder, drafter, verifier):
    for name, config in (("drafter", drafter), ("verifier", verifier)):
        checkpoints.save(folder / name, random_checkpoint(config), "huggingface")
    return [folder / "drafter", folder / "verifier"]


@pytest.mark.parametrize(
    "change,words",
    [
        ({"state_width": 35}, "backbone_hidden_size is 35, the verifier has 36"),
        ({"vocab_size": 96}, "vocab_size is 96"),
        ({"d_kv": 12}, "head_dim is 12"),
        ({"num_kv_heads": 2}, "num_key_value_heads is 2"),
        ({"rope_theta": 99.0}, "rope_theta is 99"),
    ],
)
def test_an_assistant_of_another_verifier_is_one_sentence(change, words, tmp_path):
    paths = folders(tmp_path, dataclasses.replace(TINY_ASSISTANT, **change), TINY_GEMMA4)
    with pytest.raises(ValueError, match=words):
        checkpoints.load_all(paths)


def test_an_assistant_needs_its_verifier(tmp_path, capsys):
    drafter, verifier = folders(tmp_path, TINY_ASSISTANT, TINY_GEMMA4)
    for paths in ([drafter], [verifier, drafter]):
        with pytest.raises(ValueError, match="list that model's folder right after it"):
            checkpoints.load_all(paths)
    assert decode.main([f"--drafter={verifier}", f"--verifier={drafter}", "--text=a"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_order_that_is_none_is_damage(tmp_path):
    config = dataclasses.replace(TINY_ASSISTANT, vocab_size=96, num_centroids=24, active_centroids=5)
    original = random_checkpoint(config)
    original.params["order"].set_value(np.zeros(96, np.int32))
    checkpoints.save(tmp_path / "it", original, "huggingface")
    with pytest.raises(ValueError, match="does not hold each number below 96 once"):
        checkpoints.load(tmp_path / "it")


WRONG = [
    ({"text_config": None}, "text_config is None"),
    ({"use_ordered_embeddings": True, "num_centroids": 5}, "5 centroids"),
    ({"use_ordered_embeddings": True, "num_centroids": 97, "centroid_intermediate_top_k": 98}, "98 of them"),
    ({"backbone_hidden_size": 0}, "backbone_hidden_size is 0"),
]


@pytest.mark.parametrize("change,words", WRONG, ids=lambda x: str(x)[:50])
def test_what_no_assistant_can_be_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        read_config("it", describe(TINY_ASSISTANT) | change)


def test_a_unified_assistant_is_an_assistant(tmp_path):
    """Also where transformers leaves its usual window and length out."""
    original = random_checkpoint(TINY_ASSISTANT)
    checkpoints.save(tmp_path / "it", original, "huggingface")
    content = json.loads((tmp_path / "it" / "config.json").read_text())
    content["model_type"] = "gemma4_unified_assistant"
    content["text_config"]["model_type"] = "gemma4_unified_text"
    for name in ("sliding_window", "max_position_embeddings", "hidden_size_per_layer_input"):
        del content["text_config"][name]
    (tmp_path / "it" / "config.json").write_text(json.dumps(content))
    checkpoint = checkpoints.load(tmp_path / "it")
    assert checkpoint.model.config == dataclasses.replace(TINY_ASSISTANT, window=1024, max_positions=262_144)
    jax.tree.map(np.testing.assert_array_equal, original.params, checkpoint.params)


@pytest.mark.parametrize("name,millions", [("gemma4_e2b_assistant", 78), ("gemma4_31b_assistant", 470)])
def test_presets_have_the_published_sizes(name, millions):
    shapes = jax.tree.leaves(AssistantModel(PRESETS[name]).abstract_params())
    assert round(sum(x.size for x in shapes if x.dtype != jnp.int32) / 1e6) == millions
