"""alpha_after: the lenience after a marker, from settings to texts, in batches, streams and served rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TableLM, sequence_law, table

from speccascade_jax import config as configs
from speccascade_jax.commands.decode import parse
from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import NO_TOKEN, Markers
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import deferred_drafts
from speccascade_jax.evaluation.sweep import grid
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling import programs as scheduled
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.markers import LONGEST, tokenizations, tokenized
from speccascade_jax.tokenizers.tokenizer import Tokenizer

pytest.importorskip("starlette")

from served_toys import Digits, ask, serving, streamed, toy_model

TABLES = table(39, 4), table(40, 4)
OPT = Settings(method="opt", alpha=0.0, temperature=1.0, block_size=2)
SPANS = {"100": 5.0}
DEMO = configs.DEMO / "verifier" / "spiece.model"


def cascade():
    return Cascade((TableLM(4),) * 2, TABLES, Digits(), max_source_length=16, max_new_tokens=8)


def unlike(count):
    """Texts with their settings: no markers, or such as are written often, or hardly ever."""
    kinds = [{}, SPANS, {"0": 5.0, "1": 0.0, "2": 5.0}, {"0120": 5.0, "0121": 5.0, "0122": 5.0}]
    each = [
        dataclasses.replace(OPT, alpha_after=kinds[n % 4], max_new_tokens=3 + n % 6, seed=n)
        for n in range(count)
    ]
    return ["201", "1", "10"] * (count // 3), each


def test_rows_of_a_batch_follow_their_own_spans():
    """Also in rows that have been another text's: there are more texts than rows."""
    texts, each = unlike(96)
    many = [output.tokens for output in cascade().generate(texts, each, batch_size=4)]
    alone = cascade()
    for n, (text, settings) in enumerate(zip(texts, each, strict=True)):
        [output] = alone.generate([text], settings, first_index=n)
        assert many[n] == output.tokens
    without = [dataclasses.replace(settings, alpha_after={}) for settings in each]
    assert many != [output.tokens for output in alone.generate(texts, without, batch_size=4)]  # the control


def test_rows_of_a_batch_notice_a_marker_that_survives_its_row(monkeypatch):
    refill = scheduled.refill

    def wrong(sampler, state, *arguments, **more):
        filled = refill(sampler, state, *arguments, **more)
        spans = filled.rows.spans._replace(latest=state.rows.spans.latest)
        return filled._replace(rows=filled.rows._replace(spans=spans))

    monkeypatch.setattr(scheduled, "refill", wrong)
    with pytest.raises(AssertionError):
        test_rows_of_a_batch_follow_their_own_spans()


def test_markers_and_values_share_a_program():
    made = cascade()
    [*made.generate(["201"], OPT, alpha_after=SPANS)]
    before = made.clock.compilations
    for spans in ({"1": 0.1}, {"0123": 2.0, "2": 0.0, "11": 0.5, "0" * LONGEST: 1.0}):
        [*made.generate(["201"], OPT, alpha_after=spans)]
    assert made.clock.compilations == before > 0


def test_a_stream_ends_with_the_text_of_generate():
    made = cascade()
    for seed in range(8):
        settings = dataclasses.replace(OPT, alpha_after={"0": 5.0}, seed=seed)
        [output] = made.generate(["10"], settings)
        assert [*made.stream("10", settings)][-1] == output.text


def lowered(sampler, markers):
    return loop.generate.lower(
        sampler,
        TABLES,
        jax.random.split(jax.random.key(0), 2),
        jnp.ones((2, 2), jnp.int32),
        jnp.full(2, 2),
        SamplingOptions(1.0),
        jnp.zeros(1),
        max_new_tokens=5,
        eos_id=3,
        markers=markers,
    ).as_text()


@dataclasses.dataclass(frozen=True)
class Plain(Speculative):
    """Speculative as it was before there were spans."""

    def target(self, scores, rows, draft):
        alpha, chosen = rows.alphas[:, self.level - 1, None, None], rows.methods[:, self.level - 1]
        [method] = self.methods
        pi, delta = method.target(scores, alpha)
        deferred, _ = deferred_drafts(delta, draft), chosen == 0
        return pi, deferred


def test_a_program_without_spans_is_what_it_was():
    model = TableLM(4)
    sampler, plain = (kind(Autoregressive(model), model, METHODS["opt"], 2) for kind in (Speculative, Plain))
    assert lowered(sampler, None) == lowered(plain, None)
    markers = Markers(np.full((2, 1, 3), NO_TOKEN, np.int32), np.zeros((2, 1, 1), np.float32))
    assert lowered(sampler, markers) != lowered(plain, None)  # the control


@pytest.fixture(scope="module")
def served():
    """Drafts are verified as a block."""
    model = toy_model(("opt", "speculative", "verifier"), verification="block")
    model.defaults = dataclasses.replace(model.defaults, alpha_after={"0": 0.01})
    with serving(model) as (url, _):
        yield model, url


@pytest.mark.full
def test_served_texts_are_those_of_generate(served):
    model, url = served
    for spans in ({"10": 5.0}, {"0": [5.0], "2": 0.0}, None):
        body = {"prompt": "201", "n": 12, "seed": 3, "alpha": 0.0, "origin": True}
        body |= {} if spans is None else {"alpha_after": spans}
        status, answer, _ = ask(url, body)
        assert status == 200, answer
        wanted = {"0": 0.01} if spans is None else {"10": 5.0} if "10" in spans else {"0": 5.0, "2": 0.0}
        settings = dataclasses.replace(OPT, seed=3, alpha_after=wanted, verification="block")
        outputs = [*model.cascade.generate(["201"] * 12, settings)]
        assert [choice["text"] for choice in answer["choices"]] == [output.text for output in outputs]
        origins = [[piece["origin"] for piece in choice["origin"]] for choice in answer["choices"]]
        assert origins == [output.origin for output in outputs]
        assert streamed(url, body | {"n": 1}) == outputs[0].text
        [greedy] = model.cascade.generate(["201"], settings, temperature=0.0)
        assert streamed(url, body | {"n": 1, "temperature": 0.0}) == greedy.text
    assert ask(url, {"prompt": "201", "speculative": False})[0] == 200
    assert ask(url, {"prompt": "201", "method": "speculative"})[0] == 200


@pytest.mark.parametrize(
    "value",
    [
        "0",
        {"0": "x"},
        {"0": True},
        {"0": -1},
        {"": 1},
        {"x": 1},
        {"0": [1, 2]},
        {str(n): 0 for n in range(5)},
    ],
    ids=str,
)
def test_an_invalid_span_is_refused_with_its_field(served, value):
    status, answer, _ = ask(served[1], {"prompt": "201", "alpha_after": value})
    assert (status, answer["error"]["param"]) == (400, "alpha_after"), answer


def test_a_method_without_a_lenience_refuses_spans(served):
    for body in ({"method": "speculative"}, {"speculative": False}):
        status, answer, _ = ask(served[1], {"prompt": "201", "alpha_after": {"0": 1.0}, **body})
        assert (status, answer["error"]["param"]) == (400, "alpha_after")


def test_log_probabilities_are_those_after_the_marker(served):
    """A text's are those of the law that is enumerated with the lenience at each of its positions."""
    _, url = served
    body = {"prompt": "201", "n": 12, "seed": 5, "alpha": 0.0, "alpha_after": {"0": 5.0}, "logprobs": 1}
    answer = ask(url, body)[1]
    law, other = (
        sequence_law(TABLES, ["opt"], alphas, (2, 0, 1, 3), steps=3, eos=3)
        for alphas in (lambda written: (5.0,) if 0 in written else (0.0,), (0.0,))
    )
    differ = 0
    for choice in answer["choices"]:
        tokens = tuple(int(token) for token in choice["logprobs"]["tokens"])
        chance = np.exp(sum(choice["logprobs"]["token_logprobs"]))
        assert abs(chance - law[tokens]) < 1e-5
        differ += abs(chance - other[tokens]) > 1e-3
    assert differ


# Settings


@pytest.mark.parametrize("method", [*METHODS, "verifier", "token_cascade", "bild"])
def test_the_methods_that_read_alpha_take_spans(method):
    settings = Settings(method=method, alpha_after={"x": 0.5})
    if method in METHODS and not METHODS[method].lossless:
        settings.check(levels=1)
        return
    with pytest.raises(FieldError) as error:
        settings.check(levels=1)
    assert error.value.field == "alpha_after"


def test_a_method_that_reads_no_alpha_drops_spans():
    settings = Settings(method="opt", alpha_after=SPANS)
    assert settings.by("token_v3").alpha_after == SPANS
    assert settings.by("speculative").alpha_after == settings.by("verifier").alpha_after == {}


@pytest.mark.parametrize("value", [{"x": 2.0}, {"x": (0.1, 0.2, 0.3)}, {"x": float("nan")}, {1: 0.5}, ("x",)])
def test_spans_out_of_range_are_refused(value):
    with pytest.raises(FieldError) as error:
        Settings(method=("opt", "token_v3"), alpha_after=value).check(levels=2)
    assert error.value.field == "alpha_after"


def test_a_flag_takes_markers_and_their_leniences():
    words = ["--method", "opt+token_v3", "--alpha-after", "The answer is", "0.0", "</think>", "2+0.5"]
    spans = {"The answer is": 0.0, "</think>": (2.0, 0.5)}
    assert parse([*words, "--seed", "1"]).run.alpha_after == spans
    assert parse([]).run.alpha_after == {}
    for wrong in (["x"], ["x", "y"], ["x", "0.1+"]):
        run = parse(["--method", "opt", "--alpha-after", *wrong]).run
        with pytest.raises(FieldError) as error:
            run.check()
        assert error.value.field == "alpha_after"


def test_a_sweep_keeps_the_spans_of_rules_that_read_them():
    base = Settings(alpha_after={"x": (0.5,)})
    points = grid(base, ["opt", "speculative"], [0.1], [2], [0.0])
    spans = {point.name: point.alpha_after for point in points}
    assert spans == {"verifier": {}, "drafter": {}, "opt": {"x": (0.5,)}, "speculative": {}}


def test_each_level_has_its_lenience():
    settings = Settings(method=("opt", "token_v3"), alpha_after={"x": (3.0, 0.5), "y": 0.1})
    settings.check(levels=2)
    assert settings.leniences_after(2) == {"x": (3.0, 0.5), "y": (0.1, 0.1)}


# Markers as tokens


def test_a_marker_is_found_where_it_is_written():
    """In a text's beginning and after a full stop."""
    tokenizer = Tokenizer(DEMO)
    for text in ("Wo ist der Bahnhof?", "Guten Morgen. Wo ist der Bahnhof?"):
        [written] = tokenizer.encode_batch([text])
        for marker in ("Wo ist", "Bahnhof", "?"):
            places = [
                n
                for tokens in tokenizations(tokenizer, marker)
                for n in range(len(written))
                if tuple(written[n : n + len(tokens)]) == tokens
            ]
            assert places, (text, marker)


LINES = [
    "The answer is 5.\nAnswer: 7\n\nAnswer:\n8. So the answer: 3\n",
    "Answer:\n\n5. Answer:\n6. The answer is:\n\n7",
]
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen 3 cut a text before pieces are merged, but for contractions."""


@pytest.fixture
def byte_level(tmp_path):
    """A byte-level BPE with a piece for a colon and the line breaks after it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES * 50,
        tokenizers.trainers.BpeTrainer(
            vocab_size=330, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path / "tokenizer.json")


def test_a_marker_in_byte_level_pieces_is_found_wherever_it_is_written(byte_level):
    """Each of its places in a text, by the token that completes it: also where that token goes on with line
    breaks."""
    merged = 0
    for text in LINES:
        [written] = byte_level.encode_batch([text])
        for marker in ("Answer:", "The answer is", "answer", ":"):
            known = tokenizations(byte_level, marker)
            places = [
                n
                for n in range(1, len(written) + 1)
                if any(tuple(written[max(n - len(tokens), 0) : n]) == tokens for tokens in known)
            ]
            counts = [byte_level.decode(written[:n]).count(marker) for n in range(len(written) + 1)]
            assert places == [n for n in range(1, len(written) + 1) if counts[n] > counts[n - 1]]
            merged += sum(byte_level.decode(written[n - 1 : n]).endswith("\n") for n in places)
    assert merged > 5


def test_all_spellings_of_four_markers_have_a_place(byte_level):
    rows = tokenized(byte_level, dict.fromkeys(("Answer:", "answer:", "The answer is:", ":"), (0.1,)))
    assert len(rows) > 15
    with pytest.raises(FieldError) as error:
        tokenized(byte_level, {f"{name}:": (0.1,) for name in ("Answer", "answer", "The", "is", "So")})
    assert error.value.field == "alpha_after"


def test_a_marker_that_the_vocabulary_lacks_is_refused():
    tokenizer = Tokenizer(DEMO)
    for marker in ("ﬁ", " ", "Wo ist " * LONGEST):
        with pytest.raises(FieldError) as error:
            tokenizations(tokenizer, marker)
        assert error.value.field == "alpha_after"


def test_longer_markers_come_later():
    rows = tokenized(Digits(), {"100": (0.1,), "0": (0.2,), "00": (0.3,), "10": (0.4,)})
    assert [tokens for tokens, _ in rows] == [(0,), (0, 0), (1, 0), (1, 0, 0)]
