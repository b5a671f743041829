"""EAGLE-3 heads against the authors' numbers and a reference in numpy, their laws, and their folders."""

import dataclasses
import itertools
import json
import os
import zlib
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_reference import NOWHERE, Reference
from flax import nnx
from joint_laws import FAIL_BELOW, oracle
from member_laws import check_full, check_lossless_texts, check_rows
from safetensors import safe_open
from safetensors.numpy import save_file
from served_toys import check_served
from shapes import DECODERS, EAGLE_VERIFIER, LENGTH, SOURCE, TARGET, TINY_EAGLE
from tiny_models import prefill, random_checkpoint
from toys import chi_square, target

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import eagle as spelling
from speccascade_jax.checkpoints.families import MODEL_FAMILIES
from speccascade_jax.commands import decode
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import DecoderModel, EaglePairConfig, eagle, model_of
from speccascade_jax.models.members import Network
from speccascade_jax.models.stacking import stacked
from speccascade_jax.settings import Settings

PUBLISHED = json.loads((Path(__file__).parent / "eagle3.json").read_text())
"""What the authors' code computes: three rounds of four drafted tokens, of which 0, 1 and 2 stand."""
HEADS = {
    "llama": TINY_EAGLE,
    "qwen3, normalised residual": dataclasses.replace(
        TINY_EAGLE, head_norms=True, norm_before_residual=True, layers=(4, 0)
    ),
    "its own embedding, all tokens": dataclasses.replace(
        TINY_EAGLE,
        d_model=24,
        own_embedding=True,
        draft_vocab_size=97,
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
}


def pair(drafter, verifier=EAGLE_VERIFIER, scale=0.3, **fields):
    """A pair's model and random parameters, whose drafts stand now and then."""
    model = model_of(EaglePairConfig(verifier, drafter), **fields)
    params = random_checkpoint(model.config).params
    return model, jax.tree.map(lambda x: jnp.asarray(x * scale if x.ndim > 1 else x), params)


# ---- logits ---------------------------------------------------------------------------------------------


def drawn(name, shape):
    """An array of the folders that PUBLISHED was computed from."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    return 1 + 0.1 * x if len(shape) == 1 else x * (1.0 if "embed" in name else 2 * shape[-1] ** -0.5)


def published_folders(folder):
    """Both folders, as published: config.json and safetensors."""
    for part in ("verifier", "head"):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(PUBLISHED[part]))
        config = MODEL_FAMILIES["qwen3" if part == "verifier" else "eagle3"].read_config(
            folder, spelling.as_head(PUBLISHED[part])
        )
        shapes = {path: x.shape for path, x in nnx.to_flat_state(model_of(config).abstract_params())}
        arrays = {
            name: drawn(name, shapes[path][::-1] if turned else shapes[path])
            for path, name, turned in MODEL_FAMILIES[config.family].parameter_names(config)
        }
        if part == "head":
            arrays["d2t"] = np.array(PUBLISHED["offsets"])
            arrays["t2d"] = np.isin(np.arange(61), np.array(PUBLISHED["offsets"]) + np.arange(23))
        save_file(arrays, folder / part / "model.safetensors")
    return [folder / "head", folder / "verifier"]


def as_published(drafter):
    """The greatest difference of a member's logits from PUBLISHED, over its three rounds."""
    model, params = drafter.model.member_of, drafter.params
    draft, read = (jax.jit(partial(member.extend, params)) for member in model.members)
    text, worst = PUBLISHED["text"], 0.0
    _, cache = prefill(model, params, np.array([PUBLISHED["prompt"]]), np.array([9]), 32)
    _, cache = read(np.array([[text[8]]]), cache)
    targets = np.array(PUBLISHED["offsets"]) + np.arange(23)
    for rounds in PUBLISHED["rounds"]:
        last, begin = text[rounds["text"] - 1], rounds["text"] - 1
        assert cache.length.tolist() == [begin]
        for token, expected in zip([last, *rounds["draft"]], rounds["logits"], strict=False):
            logits, cache = draft(np.array([[token]]), cache)
            worst = max(worst, np.abs(np.asarray(logits)[0, 0, targets] - expected).max())
        _, cache = read(np.array([[last, *rounds["draft"]]]), cache)
        cache = model.roll_back(cache, np.array([begin + 1 + rounds["stand"]]))
    return worst


def late(features_before, features, place):
    """The verifier's states are read one position late."""
    return features_before(features, jnp.maximum(place - 1, 0))


def rejected(advance, self, tokens, cache, after=None):
    """Features of rejected tokens are kept: what the head has written stands."""
    x, after = advance(self, tokens, cache)
    written = jnp.arange(cache.features.shape[-2])[:, None] < cache.drafted.max()
    return x, after._replace(features=jnp.where(written, cache.features, after.features))


def off_by_one(targets, self):
    return targets(self) - 1


def planted(wrong, right):
    return lambda *given, **more: wrong(right, *given, **more)


FAULTS = (
    (eagle, "features_before", late),
    (eagle.EaglePair, "advance", rejected),
    (eagle.Eagle, "targets", off_by_one),
)


def test_logits_are_those_of_the_authors_code(tmp_path):
    """Loaded from folders as published, round by round; then with planted faults."""
    drafter, verifier = checkpoints.load_all(published_folders(tmp_path))
    network = drafter.model.member_of
    assert network == verifier.model.member_of and drafter.params is verifier.params
    assert isinstance(network, Network) and isinstance(network.members[0], LanguageModel)
    assert network.config.drafter.layers == (2, 3, 4)
    assert as_published(drafter) < 2e-4
    for place, name, wrong in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, planted(wrong, getattr(place, name)))
            assert as_published(drafter) > 0.1, wrong.__name__


def check_against_reference(model, params, rounds, atol=1e-4):
    """Rounds as decoding has them, of three unlike rows, with blocks and rollbacks of any size: the head
    reads the last committed token and its draft, the verifier all of that, and each row keeps what it
    likes."""
    reference, rng = Reference(model, params), np.random.default_rng(0)
    vocab = model.vocab_size
    draft, read = (jax.jit(partial(member.extend, params)) for member in model.members)
    _, cache = prefill(model, params, SOURCE % vocab, LENGTH, 96)
    texts = [(row[:length] % vocab).tolist() for row, length in zip(SOURCE, LENGTH, strict=True)]
    for number in range(rounds):
        begins = np.array([len(text) - 1 for text in texts])
        np.testing.assert_array_equal(model.lengths(cache), np.stack([begins, begins], axis=1))
        size = int(rng.integers(1, 5))
        block = np.stack([[text[-1], *rng.integers(0, vocab, size)] for text in texts]).astype(np.int32)
        cut = int(rng.integers(1, size + 1)) if number % 2 else 1  # in one call, or two
        parts = []
        for tokens in np.split(block, [cut], axis=1):
            logits, cache = draft(tokens, cache)
            parts.append(logits)
        for row, output in enumerate(np.concatenate(parts, axis=1)):
            text = [*texts[row][:-1], *block[row].tolist()]
            expected = reference.logits(text, begins[row])[begins[row] :]
            can = expected[0] > NOWHERE
            np.testing.assert_allclose(output[:, can], expected[:, can], atol=atol)
            assert (output[:, ~can] <= NOWHERE).all() and can.sum() == model.config.drafter.draft_vocab_size
        for tokens in np.split(block, [int(rng.integers(1, size + 1))], axis=1):
            _, cache = read(tokens, cache)
        keep = rng.integers(0, size + 1, 3)
        texts = [
            [*text[:-1], *tokens[: kept + 1].tolist(), int(rng.integers(vocab))]
            for text, tokens, kept in zip(texts, block, keep, strict=True)
        ]
        cache = model.roll_back(cache, begins + 1 + keep)


@pytest.mark.full
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_logits_are_those_of_the_reference(head):
    check_against_reference(*pair(head, chunk=8), 6)


@pytest.mark.full
def test_a_verifier_of_another_family():
    """Windows, caps and scaled embeddings, stacked layers: the head reads the states as they are."""
    verifier = DECODERS["gemma2"]
    width = verifier.d_model
    head = dataclasses.replace(TINY_EAGLE, d_model=width, state_width=width, layers=(1, 2))
    model, params = pair(head, verifier)
    check_against_reference(model, params, 2)

    @partial(jax.jit, static_argnums=0)
    def read(model, params):
        _, cache = prefill(model, params, SOURCE, LENGTH, 48)
        for number in (0, 1, 0):
            logits, cache = model.extend_member(number, params, TARGET[:, :2], cache)
        return logits

    np.testing.assert_allclose(read(model, params), read(*stacked(model, params)), atol=1e-5)


@pytest.mark.full
def test_rows_and_the_verifier_alone():
    model, params = pair(TINY_EAGLE)
    check_rows(model, params)
    check_full(model, params, "verifier", model.members[1])


# ---- texts ----------------------------------------------------------------------------------------------

VOCAB, STEPS, DRAFTS = 4, 4, 2
SMALLEST = dict.fromkeys(("d_model", "d_ff"), 8) | {"vocab_size": VOCAB, "d_kv": 4, "num_heads": 2}
LAW_VERIFIER = dataclasses.replace(EAGLE_VERIFIER, **SMALLEST, num_layers=2)
LAW_HEAD = dataclasses.replace(
    TINY_EAGLE, **SMALLEST, num_kv_heads=1, draft_vocab_size=3, state_width=8, layers=(0, 1, 2)
)
PROMPTS = ((1,), (2, 0, 1))


@pytest.fixture(scope="module")
def law_pair():
    return pair(LAW_HEAD, LAW_VERIFIER, scale=0.6)


def law_of_texts(model, params, prompt, rule, alpha):
    """The probability of each text of STEPS tokens, enumerated over where a token stands in a
    round: the head's law depends on that."""
    reference = Reference(model, params, 8)

    def softmax(logits):
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    @cache
    def verifier(text):
        return softmax(reference.read(text)[1][-1])

    @cache
    def head(text, begin):
        return softmax(reference.logits(text, begin)[-1])

    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=STEPS), 0.0)

    def write(text, begin, mass):
        """`mass` that the round which begins after `begin` + 1 tokens has written `text`, all drafted."""
        written = text[len(prompt) :]
        if len(written) == STEPS:
            law[written] += mass
            return
        q, p = head(text, begin), verifier(text)
        pi = target(rule, q, p, q, p, alpha, False)
        for token in range(VOCAB):
            longer = (*text, token)
            if len(text) - 1 - begin == DRAFTS:
                write(longer, len(longer) - 1, mass * pi[token])
                continue
            stands = min(q[token], pi[token])
            if stands:
                write(longer, begin, mass * stands)
            if pi[token] > stands:
                write(longer, len(longer) - 1, mass * (pi[token] - stands))

    write(tuple(prompt), len(prompt) - 1, 1.0)
    np.testing.assert_allclose(sum(law.values()), 1)
    return law


@pytest.mark.full
@pytest.mark.parametrize("method,alpha", [("speculative", 0.0), ("opt", 0.2)])
def test_the_law_of_texts(method, alpha, law_pair, rows):
    """Chi-square against enumeration over (prefix, place): the verifier's law without a rule, another one
    with."""
    model, params = law_pair
    drafter, verifier = model.members
    sampler = Speculative(Autoregressive(drafter), verifier, METHODS[method], DRAFTS)
    which = np.arange(rows) % 2
    prompts = np.array([[1, 0, 0], [2, 0, 1]], np.int32)[which]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(rows))
    result = generate(
        sampler,
        params,
        keys,
        prompts,
        np.array([1, 3], np.int32)[which],
        SamplingOptions(1.0),
        jnp.array([alpha]),
        max_new_tokens=STEPS,
        eos_id=-1,
    )
    tokens, laws = np.asarray(result.tokens), []
    for number, prompt in enumerate(PROMPTS):
        law = law_of_texts(model, params, prompt, oracle(method), alpha)
        assert 2 * chi_square(tokens[which == number], law) > FAIL_BELOW
        laws.append(np.array(list(law.values())))
    lossless = np.array(list(law_of_texts(model, params, PROMPTS[1], "speculative", 0.0).values()))
    assert (np.abs(laws[1] - lossless).sum() > 0.05) == (method != "speculative")
    stood = np.asarray(result.counts[1].accepted).sum() / np.asarray(result.counts[1].drafted).sum()
    assert 0.1 < stood < 0.99


@pytest.mark.full
def test_greedy_texts_are_the_verifiers():
    """A thousand prompts of unlike lengths at once."""
    model, params = pair(TINY_EAGLE)
    drafter, verifier = model.members
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 1000)
    prompts = rng.integers(2, 97, (1000, 8)).astype(np.int32)
    sampler = Speculative(Autoregressive(drafter), verifier, METHODS["speculative"], 3)
    result, alone = (
        generate(
            sampler,
            given,
            jax.random.split(jax.random.key(0), 1000),
            prompts,
            lengths,
            SamplingOptions(0.0),
            jnp.zeros(sampler.level),
            max_new_tokens=8,
            eos_id=1,
        )
        for sampler, given in ((sampler, params), (Autoregressive(model.full), params["verifier"]))
    )
    np.testing.assert_array_equal(result.tokens, alone.tokens)
    assert 0 < int(result.counts[1].accepted.sum()) < int(result.counts[1].drafted.sum())


@pytest.fixture(scope="module")
def folders(gemma_vocabulary, tmp_path_factory):
    """Those of a head, its verifier and a larger model, which half agree: all of one vocabulary."""
    folder = tmp_path_factory.mktemp("heads")
    shape = dataclasses.replace(EAGLE_VERIFIER, vocab_size=352, bos_id=2)
    model, _ = pair(dataclasses.replace(TINY_EAGLE, vocab_size=352, draft_vocab_size=352), shape)
    params = model.init(0)
    larger = jax.tree.map(lambda a, b: 0.8 * a + 0.2 * b, params["verifier"], model.full.init(1))
    for name, part, given in (
        ("head", model_of(model.config.drafter), params["drafter"]),
        ("verifier", model.full, params["verifier"]),
        ("larger", model.full, larger),
    ):
        tokenizer = None if name == "head" else gemma_vocabulary
        checkpoints.save(
            folder / name, checkpoints.Checkpoint(part, given, tokenizer, "memory"), "huggingface"
        )
    return folder


TEXTS = ["ein zug", "zwei", "drei", "vier", "eine", "a"]


def cascade_of(folders, *names):
    paths = (folders / name for name in names)
    return Cascade.load(*paths, dtype=jnp.float32, max_source_length=16, max_new_tokens=8)


@pytest.mark.full
def test_a_head_drafts_within_a_hierarchy(folders):
    """For its verifier, which drafts for a larger one: in batches whose rows are replaced, the texts of the
    largest."""
    cascade = cascade_of(folders, "head", "verifier", "larger")
    settings = Settings(method="speculative", block_size=3, temperature=0.0)
    expected = list(cascade.generate(TEXTS, method="verifier", temperature=0.0, batch_size=2))
    outputs = list(cascade.generate(TEXTS, settings, batch_size=2))
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]


@pytest.mark.full
def test_rows_depend_on_nothing_but_themselves(folders):
    """At temperature 1, in batches whose rows are replaced."""
    cascade = cascade_of(folders, "head", "verifier")
    settings = Settings(method="speculative", block_size=3, temperature=1.0)
    together, alone = (
        [o.tokens for o in cascade.generate(TEXTS, settings, batch_size=size)] for size in (3, 1)
    )
    assert together == alone and len(set(map(tuple, together))) > 3


@pytest.mark.full
def test_a_pair_is_served(folders):
    cascade = cascade_of(folders, "head", "verifier")
    config = DecodeConfig(
        drafter="head", verifier="verifier", block_size=3, max_new_tokens=8, verification="block"
    )
    check_served(cascade, [f"ein zug {text}" for text in TEXTS], config, shares=True)


# ---- folders --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_pair_is_decoded_from_two_folders(folders, capsys):
    """From the command line; a head needs no tokenizer."""
    flags = [f"--drafter={folders / 'head'}", f"--verifier={folders / 'verifier'}", "--text=ein zug"]
    flags += ["--max-source-length=16", "--max-new-tokens=8"]
    check_lossless_texts(flags, capsys)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"state_width": 35}, "target_hidden_size is 35, the verifier has 36"),
        ({"vocab_size": 96}, "vocab_size is 96, the verifier has 97"),
        ({"layers": (1, 2, 5)}, r"before layers \[1, 2, 5\], the verifier has 4 layers"),
        ({"layers": ()}, r"before layers \[2, 2, 1\]"),
        ({"d_model": 24}, "holds no embed_tokens.weight"),
    ],
)
def test_a_head_of_another_verifier_is_one_sentence(change, words):
    head = model_of(dataclasses.replace(TINY_EAGLE, **change))
    with pytest.raises(ValueError, match=words):
        spelling.joined("it", head, DecoderModel(EAGLE_VERIFIER))


def test_a_head_needs_its_verifier(folders, capsys):
    for names in (["head"], ["verifier", "head"]):
        with pytest.raises(ValueError, match="an EAGLE-3 head, which only drafts for"):
            checkpoints.load_all([folders / name for name in names])
    flags = [f"--drafter={folders / 'verifier'}", f"--verifier={folders / 'head'}", "--text=a"]
    assert decode.main(flags) == 2
    assert capsys.readouterr().err.count("\n") == 1


SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 50,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": PUBLISHED["head"] | {"vocab_size": 97, "hidden_size": 36, "head_dim": 10},
}
"""The other spelling, which asks for code of its own: none is run."""
FLAT = spelling.describe(TINY_EAGLE)
WITHIN = {"eagle_aux_hidden_state_layer_ids": [1, 4, 5], "use_aux_hidden_state": True}
SPELLINGS = [
    (FLAT, {"layers": (3, 1, 2)}),
    ({**FLAT, "eagle_aux_hidden_state_layer_ids": None}, {"layers": (3, 1, 2)}),
    ({**FLAT, "eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, {"layers": ()}),
    ({**FLAT, "eagle_aux_hidden_state_layer_ids": None, "eagle_config": WITHIN}, {"layers": (2, 5, 6)}),
    ({**FLAT, "target_hidden_size": None}, {"state_width": 36}),
    (SPECULATORS, {"layers": (1, 2, 3), "norm_before_residual": True, "d_kv": 10, "rope_theta": 10_000.0}),
]


@pytest.mark.parametrize("content,fields", SPELLINGS, ids=range(len(SPELLINGS)))
def test_spellings(content, fields):
    """SGLang and SpecForge name a layer by its output, vLLM by its input."""
    config = spelling.read_config(Path("config.json"), spelling.as_head(json.loads(json.dumps(content))))
    assert {name: getattr(config, name) for name in fields} == fields


WRONG = [
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2; only heads of one layer"),
    ({"model_type": "gpt2"}, "the head's layer is a 'gpt2' one"),
    ({"norm_output": True}, "norm_output is True"),
    ({"eagle_aux_hidden_state_layer_ids": "all"}, "is 'all', not a list of layers"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, r"\[1, 1\], not different layers"),
    (
        {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": [1]},
        r"eagle_config is \[1\], not an object",
    ),
    (
        {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state is False",
    ),
    ({"draft_vocab_size": 98}, "draft_vocab_size is 98, more than the 97"),
    ({"target_hidden_size": "wide"}, "target_hidden_size is 'wide'"),
    ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
    ({"speculators_model_type": "eagle3"}, "transformer_layer_config is None, not an object"),
]


@pytest.mark.parametrize("change,words", WRONG, ids=lambda x: str(x)[:50])
def test_what_no_head_can_be_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        spelling.read_config(Path("config.json"), spelling.as_head(FLAT | change))


def test_offsets_that_lead_nowhere_are_damage(tmp_path):
    original = random_checkpoint(TINY_EAGLE)
    for wrong in (original.params["offsets"][...] + 97, np.zeros(50, np.int32)[::-1] - np.arange(50)):
        original.params["offsets"].set_value(wrong)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        checkpoints.save(folder, original, "huggingface")
        with pytest.raises(ValueError, match="does not lead to 50 different tokens of 97"):
            checkpoints.load(folder)


def test_other_names_of_the_arrays(tmp_path):
    """Those of vLLM's speculators, with an embedding; the verifier's head is not read."""
    original = random_checkpoint(dataclasses.replace(TINY_EAGLE, own_embedding=True))
    checkpoints.save(tmp_path / "it", original, "huggingface")
    with safe_open(tmp_path / "it" / "model.safetensors", "numpy") as file:
        arrays = {name.replace("midlayer.", "layers.0."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    arrays |= {"t2d": np.zeros(97, bool), "verifier_lm_head.weight": np.zeros((50, 36), np.float32)}
    save_file(arrays, tmp_path / "it" / "model.safetensors")
    again = checkpoints.load(tmp_path / "it")
    assert again.model.config == original.model.config
    jax.tree.map(np.testing.assert_array_equal, original.params, again.params)


class Runs:
    """What a pickle would run."""

    def __reduce__(self):
        return (os.mkdir, ("ran",))


def test_a_torch_file_is_read_and_never_unpickled(tmp_path, monkeypatch):
    """As torch writes it, with the dtypes of heads; and files that do more than hold tensors."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    original = random_checkpoint(TINY_EAGLE)
    checkpoints.save(tmp_path / "it", original, "huggingface")
    with safe_open(tmp_path / "it" / "model.safetensors", "pt") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    module = torch.nn.Module()
    for name, array in (arrays | {"t2d": torch.zeros(97, dtype=torch.bool)}).items():
        array = array.long() if name == "d2t" else array
        module.register_buffer(name.replace(".", "+"), array)
    state = type(module.state_dict())(
        (name.replace("+", "."), x) for name, x in module.state_dict().items()
    )  # with the attribute that a module's has
    state._metadata = module.state_dict()._metadata
    state["fc.weight"] = torch.nn.Parameter(state["fc.weight"])
    (tmp_path / "it" / "model.safetensors").unlink()
    path = tmp_path / "it" / "pytorch_model.bin"
    torch.save(state, path)
    again = checkpoints.load(tmp_path / "it")
    jax.tree.map(np.testing.assert_array_equal, original.params, again.params)
    torch.save({name: x.to(torch.bfloat16) if x.ndim > 1 else x for name, x in state.items()}, path)
    kernel = checkpoints.load(tmp_path / "it").params["projection"]["kernel"][...]
    np.testing.assert_allclose(kernel, original.params["projection"]["kernel"][...], rtol=2**-8)

    for wrong, words in (
        (state | {"more": Runs()}, "it calls 'posix mkdir', which is not done"),
        ({"a": torch.zeros(3, 2).T}, "do not lie one after the other"),
        ([1, 2], "operation EMPTY_LIST"),
        ((1, 2), "not a dictionary of tensors"),
        ({"a": torch.zeros(2)}, r"array fc\.weight is missing"),
    ):
        torch.save(wrong, path)
        with pytest.raises(ValueError, match=words):
            checkpoints.load(tmp_path / "it")
    for content in (b"x" * 99, path.read_bytes()[:-40]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged"):
            checkpoints.load(tmp_path / "it")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name,millions", [("llama3_8b_eagle3", 425), ("qwen3_8b_eagle3", 400)])
def test_presets_have_the_published_sizes(name, millions):
    shapes = jax.tree.leaves(eagle.EagleModel(eagle.PRESETS[name]).abstract_params())
    assert round(sum(x.size for x in shapes if x.dtype != jnp.int32) / 1e6) == millions
