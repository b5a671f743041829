"""String-level exact match: texts that pass between different tokenizers."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from corpora import SENTENCES, shuffled
from flax import nnx
from sentencepiece import sentencepiece_model_pb2
from tiny_models import prefill
from toys import TableLM

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.config import DEMO
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.vocabularies import slem
from speccascade_jax.vocabularies.slem import TextDrafter, going_on, longest_matches, whole_characters
from speccascade_jax.vocabularies.translated import Translated, TranslatedParams

LIMITS = {"max_source_length": 32, "max_new_tokens": 24}
GERMAN = [
    "Wo ist der Bahnhof? Ich muss den letzten Zug nach Berlin fangen.",
    "Tom sagte, dass er morgen kommen würde, aber ich glaube ihm nicht.",
    "Sie öffnete das Fenster, weil es im Zimmer zu heiß war.",
]


def test_a_run_that_ends_where_the_old_tokens_end():
    assert going_on([1, 2, 3], [9, 2, 3, 7, 8]) == [7, 8]
    assert going_on([1, 2, 3], [2, 3, 5, 3, 7]) == [5, 3, 7]  # two that agree before one
    assert going_on([3], [3, 5, 3, 7]) == [7]  # of equals the last
    assert going_on([1, 2, 3], [1, 2, 4]) is None and going_on([], [1]) is None


def test_incomplete_characters_are_held_back():
    text = "heiß 🙂".encode()
    for end in range(len(text) + 1):
        said, held = whole_characters(text[:end])
        assert said.encode() + held == text[:end]
    assert whole_characters(b"ab\xff") == ("ab\N{REPLACEMENT CHARACTER}", b"")
    assert longest_matches(b"abcab", {b"a": 0, b"ab": 1, b"c": 2}, 2) == [1, 2, 1]
    assert longest_matches(b"abxab", {b"a": 0, b"ab": 1}, 2) == [1]


def drafter(drafter_tokenizer, target, begins=True):
    """What passes texts between two tokenizers; the model is of no account."""
    model = Translated(TableLM(drafter_tokenizer.size), target.size, 8, 3.0, 0 if begins else None)
    return TextDrafter(model, drafter_tokenizer, TranslatedParams(None, None, None), target, 32, 48)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_drafted_text_becomes_the_tokens_that_follow(lossy, spiece):
    """A drafter that writes what the verifier will, in its own tokens (of other languages, so mostly letters
    and bytes): nearly all candidates are the verifier's own next tokens, wherever the draft begins."""
    target = Tokenizer(DEMO / "verifier" / "spiece.model")
    drafter_tokenizer = Tokenizer(spiece if lossy else DEMO / "e2e_verifier" / "spiece.model")
    texts, right, asked = drafter(drafter_tokenizer, target), 0, 0
    for text in GERMAN:
        tokens = target.encode_batch([text.lower() if lossy else text])[0] + [target.eos_id]
        for at in range(len(tokens)):
            _, held = texts.drafter_tokens(tokens[:at])
            rest = target.decode(tokens[:-1]).encode()[len(target.decode(tokens[:at]).encode()) :]
            ahead = (
                [*longest_matches(rest, texts.drafter.ids, texts.drafter.longest), drafter_tokenizer.eos_id]
                if at
                else [*drafter_tokenizer.encode_batch([target.decode(tokens)])[0], drafter_tokenizer.eos_id]
            )
            candidates = texts.candidates([], tokens[:at], held, ahead)
            asked += len(tokens) - at
            right += sum(a == b for a, b in zip(candidates, tokens[at:], strict=False))
    assert right > 0.9 * asked


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A drafter whose tokenizer lower-cases, folds spaces and writes what it does not know in bytes."""
    folder = tmp_path_factory.mktemp("foreign")
    with (folder / "spiece.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(shuffled(SENTENCES)),
            model_writer=file,
            vocab_size=290,
            pad_id=0,
            eos_id=1,
            bos_id=-1,
            unk_id=2,
            normalization_rule_name="nmt_nfkc_cf",
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
            num_threads=1,
        )
    tokenizer = Tokenizer(folder / "spiece.model")
    [loud, quiet] = tokenizer.encode_batch(["The  CAT \u6f22", "the cat \u6f22"])
    assert loud == quiet and tokenizer.id_of("<0xE6>") in loud
    model = T5Model(
        T5Config(
            vocab_size=304,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_heads=4,
            num_encoder_layers=1,
            num_decoder_layers=1,
        )
    )
    huggingface.save(folder / "model", model, model.init(3), np.float32)
    (folder / "spiece.model").rename(folder / "model" / "spiece.model")
    return folder / "model"


@pytest.mark.full(quick=["0.0"])
@pytest.mark.parametrize("stop_below", [0.0, slem.LEAST_CHANCE])
def test_greedy_texts_are_the_verifiers(foreign, t5_pair, stop_below, full, monkeypatch):
    """With drafts as long as may be; and as they come: of one own token, so unsure is this drafter."""
    monkeypatch.setattr(slem, "LEAST_CHANCE", stop_below)
    cascade = Cascade.load(foreign, t5_pair / "verifier", vocabulary="slem", **LIMITS)
    alone = [output.tokens for output in cascade.generate(SENTENCES, method="verifier", batch_size=4)]
    for batch_size in (1, 4) if full else (4,):
        outputs = list(cascade.generate(SENTENCES, block_size=3, batch_size=batch_size))
        assert [output.tokens for output in outputs] == alone
    assert all(
        (output.counts["drafter_passes"] > output.counts["rounds"]) == (not stop_below) for output in outputs
    )
    assert list(cascade.stream(SENTENCES[0], block_size=3))[-1] == outputs[0].text
    with pytest.raises(FieldError) as refused:
        cascade.generate(SENTENCES, method="opt", alpha=0.3)
    assert (refused.value.field, refused.value.value) == ("method", "opt")


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory):
    """A model whose pieces are letters, and the same model with the letters numbered the other way round."""
    folder = tmp_path_factory.mktemp("renumbered")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(shuffled(SENTENCES)),
        model_writer=written,
        vocab_size=64,
        model_type="char",
        pad_id=0,
        eos_id=1,
        bos_id=-1,
        unk_id=2,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    pieces = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    size = len(pieces.pieces)
    turned = np.r_[:3, size - 1 : 2 : -1]
    model = T5Model(
        T5Config(
            vocab_size=size,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_heads=4,
            num_encoder_layers=1,
            num_decoder_layers=2,
        )
    )
    for name, order in (("verifier", np.arange(size)), ("drafter", turned)):
        params = dict(nnx.to_flat_state(model.init(6)))
        embedding, head = params["embedding",], params["head", "kernel"]
        letters = head.get_value().at[:, :3].set(0)  # so that texts are letters, without an end
        params["embedding",] = embedding.replace(embedding.get_value()[order])
        params["head", "kernel"] = head.replace(letters[:, order])
        huggingface.save(folder / name, model, nnx.from_flat_state(list(params.items())), np.float32)
        renamed = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
        for place, piece in zip(renamed.pieces, order, strict=True):
            place.CopyFrom(pieces.pieces[piece])
        (folder / name / "spiece.model").write_bytes(renamed.SerializeToString())
    return folder


def test_the_drafter_drafts_from_the_text_that_it_has_read(renumbered, monkeypatch):
    """A drafter that is its verifier in other numbers is hardly ever rejected, up to the last round. (Where a
    text repeats itself, the place at which a draft goes on can be mistaken.)"""
    monkeypatch.setattr(slem, "LEAST_CHANCE", 0.0)
    cascade = Cascade.load(renumbered / "drafter", renumbered / "verifier", vocabulary="slem", **LIMITS)
    counts = [output.counts for output in cascade.generate(SENTENCES, block_size=3, batch_size=4)]
    accepted, drafted = (sum(row[name] for row in counts) for name in ("accepted", "drafted"))
    assert accepted > 0.9 * drafted > 70


def test_a_draft_ends_when_its_acceptance_becomes_unlikely():
    """Each token leads to the next, 2 after 1 and so on, with its chance in the table; 6 is the end."""
    chances = np.array([0.9, 0.9, 0.8, 0.5, 0.75, 0.9, 0.9])
    logits = np.zeros((8, 8))
    for token, chance in enumerate(chances):
        logits[token] = np.log((1 - chance) / 7)
        logits[token, token + 1] = np.log(chance)
    model, first = TableLM(8), jnp.array([0, 1, 3, 4])
    table = jnp.asarray(np.broadcast_to(logits, (8, 8, 8)), jnp.float32)
    _, cache = prefill(model, table, first[:, None], jnp.ones(4, jnp.int32), 16)
    allowed, keep, size = np.ones(8, bool), np.zeros(4, np.int32), np.array([1, 1, 1, 0])
    tokens, length, _ = slem.draft(model, 6, 7, table, allowed, cache, keep, first[:, None], size)
    assert length.tolist() == [5, 4, 3, 0]  # 0.9 0.9 0.8 0.5 0.75 < 0.3; 0.9 0.8 0.5 0.75 < 0.3; to the end
    for row, begin in enumerate(first[:3]):
        drafted = tokens[row, : length[row]].tolist()
        assert drafted == list(range(begin + 1, begin + 1 + len(drafted)))


def test_any_tokens_make_candidates():
    """Bytes in any order, halves of characters, padding: candidates are tokens with a text, or the end."""
    target, drafter_tokenizer = (
        Tokenizer(DEMO / name / "spiece.model") for name in ("verifier", "e2e_verifier")
    )
    texts, rng = drafter(drafter_tokenizer, target), np.random.default_rng(0)
    known = {n for n, surface in enumerate(target.surfaces()) if surface.text} | {target.eos_id}
    for _ in range(300):
        written = rng.integers(0, rng.choice([259, 2048]), rng.integers(0, 12)).tolist()
        drafted = rng.integers(0, rng.choice([259, 512]), rng.integers(1, 8)).tolist()
        ids, held = texts.drafter_tokens(written)
        assert all(0 <= n < drafter_tokenizer.size for n in ids) and len(held) < 4
        assert set(texts.candidates([], written, held, drafted)) <= known


@pytest.mark.full
def test_mixed_scripts_emoji_and_broken_characters(foreign, t5_pair):
    """Greedy texts of 500 lines in many scripts, whose outputs are any bytes: the verifier's own."""
    cascade = Cascade.load(foreign, t5_pair / "verifier", vocabulary="slem", **LIMITS)
    rng = np.random.default_rng(1)
    letters = list("abc XYZ äß 漢字 кот שלום 🙂👩\u200d👧 \u0301\u00a0\ufffd")
    lines = ["x" + "".join(rng.choice(letters, rng.integers(1, 14))) for _ in range(500)]
    alone = cascade.generate(lines, method="verifier", batch_size=32, truncate=True)
    outputs = cascade.generate(lines, block_size=3, batch_size=32, truncate=True)
    assert [output.tokens for output in outputs] == [output.tokens for output in alone]


@pytest.mark.full
def test_a_row_does_not_depend_on_its_batch(foreign, t5_pair):
    cascade = Cascade.load(foreign, t5_pair / "verifier", vocabulary="slem", **LIMITS)
    options = {"method": "token_v3", "alpha": 0.5, "temperature": 1.0, "block_size": 3}
    texts = [*SENTENCES, *(text[n:] for n in (2, 4) for text in SENTENCES), *GERMAN, *SENTENCES[:3]]
    alone = [output.tokens for output in cascade.generate(texts, truncate=True, **options)]
    assert len(set(map(tuple, alone))) > 16
    together = cascade.generate(texts, batch_size=16, truncate=True, **options)
    assert [output.tokens for output in together] == alone
