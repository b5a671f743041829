"""Training from scratch on a toy task: it learns, resumes exactly, and its checkpoints decode."""

import dataclasses
import itertools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import huggingface, t5
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.evaluation.quality import METRICS, bleu
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import model_of
from speccascade_jax.models.layers import project
from speccascade_jax.models.presets import GEMMA2
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.parallel import make_mesh
from speccascade_jax.tokenizers.tokenizer import Tokenizer, train_tokenizer
from speccascade_jax.training import loop as training_loop
from speccascade_jax.training.data import (
    Batch,
    TrainingBatches,
    joined_examples,
    texts,
    validation_batches,
)
from speccascade_jax.training.distillation import (
    distillation_loss,
    distilled,
    on_policy_texts,
    write_outputs,
)
from speccascade_jax.training.loop import train
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.preparation import prepare_tokenizer
from speccascade_jax.training.steps import make_steps, one_step
from speccascade_jax.vocabularies.matching import cut_as


@pytest.fixture(scope="module")
def trained(number_words):
    return train(number_words, METRICS[number_words.task.metric])


def events(run, kind):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_learns_and_records(trained, number_words):
    first, last = events(trained, "evaluation")[0], events(trained, "evaluation")[-1]
    assert last["loss"] < first["loss"] and last["quality"] > 50
    assert events(trained, "start")[0]["config"]["name"] == "toy"


@pytest.mark.full
def test_run_and_export_decode_alike(trained, number_words):
    """bfloat16 rounding aside, the exported folder is the run's best checkpoint."""
    run, export = (checkpoints.load(path).params for path in (trained, number_words.export_dir))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), run)
    jax.tree.map(np.testing.assert_array_equal, rounded, export)
    cascade = Cascade.load(trained, number_words.export_dir, max_source_length=24, max_new_tokens=24)
    examples = joined_examples(number_words.task, number_words.task.validation)
    outputs = cascade.generate([s for s, _ in examples], batch_size=8)
    assert bleu([o.text for o in outputs], [r for _, r in examples]) > 50


@pytest.mark.full
def test_a_killed_run_ends_as_an_uninterrupted_one(trained, number_words, tmp_path, monkeypatch):
    again = dataclasses.replace(number_words, output_dir=str(tmp_path / "run"), export_dir=None)
    from_step = TrainingBatches.from_step

    def dying(self, step):
        yield from itertools.islice(from_step(self, step), 130)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingBatches, "from_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(again)
    resumed = checkpoints.load(train(again)).params
    jax.tree.map(np.testing.assert_array_equal, resumed, checkpoints.load(trained).params)
    assert [e["step"] for e in events(tmp_path / "run", "start")] == [0, 120]


def test_batches_are_a_function_of_the_step(trained, number_words):
    tokenizer = prepare_tokenizer(number_words)
    batches = TrainingBatches(number_words.task, tokenizer, number_words.batch_tokens, seed=3)
    walked = list(itertools.islice(batches.from_step(0), 60))  # several epochs
    for step in (0, 1, 17, 59):
        for a, b in zip(next(batches.from_step(step)), walked[step], strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(
        (a.source.shape != b.source.shape) or (a.source != b.source).any()
        for a, b in itertools.pairwise(walked)
    )


@pytest.mark.full
def test_a_student_learns_from_its_teacher_alone(trained, number_words, tmp_path):
    student = dataclasses.replace(
        number_words,
        output_dir=str(tmp_path / "run"),
        teacher=str(trained),
        steps=100,
        distillation=1.0,
        export_dir=None,
        seed=1,
    )
    run = train(student)
    assert events(run, "evaluation")[-1]["loss"] < events(trained, "evaluation")[0]["loss"] + 0.3


@pytest.mark.full
def test_a_student_learns_from_what_its_teacher_writes(trained, number_words, tmp_path, monkeypatch):
    """teacher_outputs holds the teacher's own greedy outputs, however often writing it was killed."""
    path = tmp_path / "outputs.jsonl"
    student = dataclasses.replace(
        number_words,
        output_dir=str(tmp_path / "run"),
        teacher=str(trained),
        steps=60,
        distillation=0.0,
        export_dir=None,
        seed=1,
        teacher_outputs=str(path),
    )
    generate = Cascade.generate

    def dying(self, *args, **options):
        yield from itertools.islice(generate(self, *args, **options), 130)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Cascade, "generate", dying)
        with pytest.raises(KeyboardInterrupt):
            train(student)
    part = path.with_name("outputs.jsonl.part")
    assert not path.exists() and len(part.read_text().splitlines()) == 130
    part.write_bytes(part.read_bytes()[:-5])  # and inside a line
    judged = []
    monkeypatch.setattr(
        training_loop,
        "validation_batches",
        lambda *arguments: judged.extend(validation_batches(*arguments)) or judged,
    )
    run = train(student)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    teacher = Cascade.load(trained, trained, max_source_length=24, max_new_tokens=24)
    sources = [source for source, _ in joined_examples(number_words.task, number_words.task.train)]
    expected = {
        o.source: o.text
        for o in teacher.generate(sources, method="verifier", batch_size=64)
        if o.tokens[-1] == teacher.tokenizer.eos_id
    }
    assert [line["source"] for line in lines] == [s for s in sources if s in expected]
    agree = np.mean([expected[line["source"]] == line["target"] for line in lines])
    assert agree > 0.99  # the trainer's batches may round a tie the other way
    assert events(run, "evaluation")[-1]["loss"] < 3.0 and not part.exists()
    kept = [json.loads(line) for line in path.with_name("outputs.validation.jsonl").read_text().splitlines()]
    targets = [
        teacher.tokenizer.decode(row[:size].tolist())
        for batch in judged
        for row, size in zip(batch.target, batch.target_length, strict=True)
        if size
    ]
    assert sorted(targets) == sorted(line["target"] for line in kept)
    outputs = teacher.generate([line["source"] for line in kept], method="verifier", batch_size=64)
    assert np.mean([o.text == line["target"] for o, line in zip(outputs, kept, strict=True)]) > 0.8


def test_single_outputs_are_written_once_and_joined_in_training(tmp_path):
    """The teacher stands for one that writes in capitals."""
    train, path = tmp_path / "train.jsonl", tmp_path / "outputs.jsonl"
    train.write_text(
        "".join(
            json.dumps({"source": s, "target": t}) + "\n"
            for s, t in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"))
        )
    )
    task = Task(str(train), "", "", join=3)

    class Capitals:
        tokenizer = types.SimpleNamespace(eos_id=1)

        def generate(self, sources, **_):
            return (
                types.SimpleNamespace(source=s, text=s.upper(), tokens=[1], truncated=False) for s in sources
            )

    write_outputs(Capitals(), task, path, singles=True)
    assert sorted((e["source"], e["target"]) for e in map(json.loads, path.read_text().splitlines())) == [
        ("a", "A"),
        ("b", "B"),
        ("c", "C"),
    ]
    assert distilled(task, path, singles=True).join == 3 and distilled(task, path).join == 1


def test_targets_are_cut_as_the_teacher_cuts_them(number_words, tmp_path, monkeypatch):
    """What a run learns from, and what it is judged by; the sources are in its own tokens as ever."""
    seen = []

    def caught(self, step):
        seen.append(self)
        raise KeyboardInterrupt

    def validated(*arguments):
        seen.append(validation_batches(*arguments))
        return seen[-1]

    monkeypatch.setattr(TrainingBatches, "from_step", caught)
    monkeypatch.setattr(training_loop, "validation_batches", validated)
    student = dataclasses.replace(
        number_words,
        output_dir=str(tmp_path / "run"),
        teacher=str(tmp_path),
        teacher_tokens=True,
        distillation=0.0,
    )
    model, path = T5Model(student.model), tmp_path / "spiece.model"
    huggingface.save(tmp_path, model, model.init(0))
    train_tokenizer(
        (text for two in texts(student.task, student.task.train) for text in two[:2]),
        path,
        280,
        pieces="char",
    )
    with pytest.raises(KeyboardInterrupt):
        train(student)
    tokenizer = Tokenizer(student.tokenizer)
    cut = cut_as(Tokenizer(path), tokenizer)
    [validation, *_], data = seen
    sources, targets, _ = map(list, zip(*texts(student.task, student.task.train), strict=True))
    target_rows = [data.targets.row(n).tolist() for n in range(len(targets))]
    assert target_rows == cut(targets) != tokenizer.encode_batch(targets)
    assert [data.sources.row(n).tolist() for n in range(len(sources))] == tokenizer.encode_batch(sources)
    [(source, [target]), *_] = joined_examples(student.task, student.task.validation)
    assert validation.target[0, : validation.target_length[0]].tolist() == [
        *cut([target])[0],
        tokenizer.eos_id,
    ]
    assert validation.source[0, : validation.source_length[0]].tolist() == tokenizer.framed(
        tokenizer.encode_batch([source])[0]
    )


def test_hugging_face_datasets_are_read_by_name(tmp_path, monkeypatch):
    """A folder of that name replaces the hub."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "pairs").mkdir(parents=True)
    line = json.dumps({"translation": {"en": "one", "de": "eins"}})
    (tmp_path / "someone" / "pairs" / "train.jsonl").write_text(line + "\n")
    task = Task(
        train="", validation="", test="", source_field="translation.en", target_field="translation.de"
    )
    assert list(texts(task, "hf://someone/pairs:train")) == [("one", "eins", ["eins"])]
    for name, said in (("someone/pairs", "names no split"), ("pairs:train", "ORGANISATION/NAME")):
        with pytest.raises(ValueError, match=said):
            list(texts(task, f"hf://{name}"))


def test_tfds_texts_are_decoded(monkeypatch):
    """A stub replaces the library, which needs TensorFlow."""
    stub = types.SimpleNamespace(
        as_numpy=iter, load=lambda name, split: [{"source": f"{name} {split}".encode(), "target": b"eins"}]
    )
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", stub)
    assert list(texts(Task("", "", ""), "tfds://wmt14/de-en:test")) == [
        ("wmt14/de-en test", "eins", ["eins"])
    ]


def test_rouge_takes_the_best_reference_and_no_stems():
    assert METRICS["rouge2"](["the cat sat", "a b"], [["no", "the cat sat"], ["a b"]]) == 100.0
    assert METRICS["rouge1"](["the cats sat"], [["the cat sat"]]) == pytest.approx(200 / 3)


@pytest.mark.full
def test_adafactor_steps_as_transformers_does(tmp_path):
    """50 fine-tuning steps of one T5: the losses are those of torch and transformers' Adafactor."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = T5Config(
        vocab_size=160,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout_rate=0.0,
    )
    described = {theirs: getattr(shape, ours) for ours, theirs in t5.CONFIG_KEYS.items()}
    reference = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **described, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0
        )
    )
    reference.lm_head.weight = torch.nn.Parameter(torch.randn_like(reference.lm_head.weight) * 0.1)
    reference.save_pretrained(tmp_path / "hf")
    checkpoint = checkpoints.load(tmp_path / "hf")
    theirs = transformers.optimization.Adafactor(
        reference.parameters(), lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False
    )
    config = TrainConfig(
        name="",
        output_dir="",
        model=shape,
        task=Task("", "", ""),
        learning_rate=1e-2,
        z_loss=0.0,
        dtype="float32",
    )
    mesh, optimizer = make_mesh(), make_optimizer(config)
    steps = make_steps(checkpoint.model, config, optimizer, mesh)
    params, state = checkpoint.params, optimizer.init(checkpoint.params)
    rng, losses = np.random.default_rng(0), []
    for number in range(50):
        source = rng.integers(2, 160, (8, 12)).astype(np.int32)
        target = np.sort(source, axis=1)
        lengths = rng.integers(6, 13, 8).astype(np.int32)
        full = np.full(8, 12, np.int32)
        grads, loss, count = steps.gradients(params, Batch(source, full, target, lengths), number, None)
        params, state, _ = steps.update(params, state, grads, count)
        labels = torch.tensor(np.where(np.arange(12) < lengths[:, None], target, -100)).long()
        shifted = np.pad(target[:, :-1], ((0, 0), (1, 0)))
        reference_loss = reference(
            input_ids=torch.tensor(source).long(),
            labels=labels,
            decoder_input_ids=torch.tensor(shifted).long(),
        ).loss
        theirs.zero_grad()
        reference_loss.backward()
        theirs.step()
        assert abs(float(loss / count) - reference_loss.item()) < 0.01 * reference_loss.item(), number
        losses.append(reference_loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_distillation_loss_is_a_masked_divergence():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32) for _ in range(2))
    length = jnp.array([3, 1])
    assert abs(distillation_loss(a, a, length, "kl")) < 1e-6
    p, q = (np.asarray(jax.nn.softmax(x)) for x in (b, a))
    expected = (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(
        distillation_loss(a, b, length, "kl"), expected[0].sum() + expected[1, 0], rtol=1e-5
    )


@pytest.mark.full
def test_texts_of_the_models_own_follow_its_law(number_words):
    """The first two tokens' frequencies against the enumerated distribution, and where a text ends."""
    shape = dataclasses.replace(number_words.model, vocab_size=5)
    model, eos, rows = model_of(shape), 1, 8192
    params = jax.tree.map(lambda x: 3 * x, model.init(0))
    source, asked = np.array([3, 4, 1]), np.zeros((rows, 6), np.int32)
    batch = Batch(np.tile(source, (rows, 1)), np.full(rows, 3), asked, np.full(rows, 6))
    sample = on_policy_texts(model, params, batch, jax.random.key(5), eos)
    target, length = np.asarray(sample.target), np.asarray(sample.target_length)
    ends = np.where((target == eos).any(axis=1), (target == eos).argmax(axis=1) + 1, 6)
    np.testing.assert_array_equal(length, ends)
    assert (target[np.arange(6) >= length[:, None]] == 0).all()

    starts = np.array([[a, b] for a in range(5) for b in range(5)], np.int32)
    logits = jax.jit(model.forced)(params, np.tile(source, (25, 1)), np.full(25, 3), starts)
    first, second = np.moveaxis(np.asarray(jax.nn.softmax(logits)), 1, 0)
    law = np.array([first[n, a] * (second[n, b] if a != eos else b == 0) for n, (a, b) in enumerate(starts)])
    seen = np.bincount(target[:, 0] * 5 + target[:, 1], minlength=25)
    chance = law > 0
    assert seen[~chance].sum() == 0 and law.sum() == pytest.approx(1)
    assert ((seen - rows * law)[chance] ** 2 / (rows * law[chance])).sum() < 60  # 20 degrees: 1e-5


@pytest.mark.full
def test_on_policy_batches_are_learnt_from_the_teacher_alone(number_words):
    """A student that is its teacher has nothing to learn from its own texts; from the data it has."""
    config = dataclasses.replace(
        number_words, distillation=0.5, model=dataclasses.replace(number_words.model, dropout_rate=0.0)
    )
    model, mesh = model_of(config.model), make_mesh()
    params, optimizer = model.init(0), make_optimizer(config)
    batches = TrainingBatches(config.task, prepare_tokenizer(config), config.batch_tokens, seed=3)
    norms = {}
    for share in (1.0, 0.0):
        run_config = dataclasses.replace(config, on_policy=share)
        steps = make_steps(model, run_config, optimizer, mesh, model, eos_id=1)
        copied = jax.tree.map(jnp.copy, (params, optimizer.init(params)))
        *_, norms[share], _ = one_step(steps, *copied, batches.from_step(0), 0, run_config, mesh, params)
    assert norms[1.0] < 1e-4 < 1e-2 < norms[0.0]


@pytest.mark.parametrize("tied", [False, True])
def test_mixed_precision_gradients_are_those_of_float32(tied):
    """bfloat16 operands, float32 sums: within bfloat16's rounding of the float32 gradient. Tied: the kernel
    is an embedding, whose gradient is transposed."""
    shapes = (4, 6, 64), (64, 128)
    x, kernel = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))

    def gradients(dtype):
        def loss(kernel, x):
            return jnp.sum(jnp.sin(0.1 * project(x, kernel.T if tied else kernel, dtype)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(kernel.T if tied else kernel, x)

    for half, full in zip(gradients(jnp.bfloat16), gradients(jnp.float32), strict=True):
        assert half.dtype == jnp.float32
        np.testing.assert_allclose(half, full, atol=0.02 * float(np.abs(full).max()))


@pytest.mark.full
def test_a_decoder_only_model_learns_a_task_and_decodes_it(number_words, tmp_path):
    """The toy translation above as a prompt and its continuation, from config to text."""
    folder = tmp_path / "run"
    shape = dataclasses.replace(
        GEMMA2,
        vocab_size=300,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        num_kv_heads=2,
        num_layers=2,
        window=12,
        query_scalar=8,
    )
    config = dataclasses.replace(
        number_words,
        output_dir=str(folder),
        model=shape,
        tokenizer=str(tmp_path / "spiece.model"),
        task=dataclasses.replace(number_words.task, suffix=" =", join=1),
        steps=300,
        eval_every=300,
        save_every=300,
        export_dir=None,
    )
    train(config)
    examples = joined_examples(config.task, config.task.validation)
    cascade = Cascade.load(folder, folder, max_source_length=24, max_new_tokens=24, suffix=" =")
    assert cascade.encode(["one two"])[0][0][0] == cascade.tokenizer.bos_id == 2
    outputs = list(cascade.generate([source for source, _ in examples], batch_size=8))
    assert (
        np.mean([output.text == targets[0] for output, (_, targets) in zip(outputs, examples, strict=True)])
        > 0.8
    )
    assert all(output.tokens[-1] == cascade.tokenizer.eos_id for output in outputs)
