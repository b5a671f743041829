"""A mistake in a training run is one sentence, before anything is trained or overwritten."""

import contextlib
import dataclasses
import gzip
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import SCRIPTS
from refusals import names, refusals

from speccascade_jax import checkpoints, cluster
from speccascade_jax.cluster import connect
from speccascade_jax.commands import finetune
from speccascade_jax.commands.commandline import sentence
from speccascade_jax.config import Task
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.outputs import OutputFile
from speccascade_jax.inference.text import Cascade
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.training import distillation
from speccascade_jax.training.data import joined_examples, texts
from speccascade_jax.training.loop import export, locked
from speccascade_jax.training.reporting import loss_curve, read_events

CONFIG = """
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

task = Task(train="{folder}/train.jsonl", validation="{folder}/train.jsonl", test="", max_source_length=16,
            max_target_length=16)
config = TrainConfig(
    name="toy", output_dir="{folder}/run", task=task, tokenizer="{folder}/spiece.model", tokenizer_size=290,
    model=T5Config(vocab_size=296, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_encoder_layers=1,
                   num_decoder_layers=1),
    steps=1, batch_tokens=128, dtype="float32", log_every=1, validation_examples=0)
"""
LINES = [{"source": "one two", "target": "eins zwei"}, {"source": "three", "target": "drei"}] * 20


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "toy.py").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture
def refused(toy, tmp_path, capfd):
    """A function from flags to the error that they end in, said once: nothing else is written, and nothing
    saved."""

    def said(*flags):
        began = time.monotonic()
        with refusals() as errors:
            code = finetune.main([f"--config={toy / 'toy.py'}", f"--output-dir={tmp_path / 'run'}", *flags])
        error = capfd.readouterr().err
        assert code == 2 and error == f"error: {sentence(errors[0])}\n" and len(error.splitlines()) == 1, (
            error
        )
        assert not (tmp_path / "run" / "latest").exists() and time.monotonic() - began < 10
        return errors[0]

    return said


@pytest.mark.parametrize(
    "flag",
    [
        "learning-rate=nan",
        "learning-rate=inf",
        "learning-rate=-1",
        "label-smoothing=1",
        "label-smoothing=nan",
        "distillation=1.5",
        "distillation=-0.1",
        "distillation=nan",
        "on-policy=1.1",
        "z-loss=nan",
        "z-loss=-1",
        "clip-norm=0",
        "clip-norm=nan",
        "clip-norm=inf",
        "weight-decay=-1",
        "weight-decay=nan",
        "warmup-steps=-1",
        "tokenizer-size=0",
        "teacher-examples=0",
        "validation-examples=-1",
        "steps=0",
        "seed=-1",
        "seed=9223372036854775808",
        "max-source-length=0",
        "max-target-length=-1",
        "join=0",
        "join=-3",
        "d-model=0",
        "num-heads=-1",
        "dropout-rate=1.5",
        "num-decoder-layers=1000000000",
    ],
)
def test_values_out_of_their_range_are_named(refused, flag):
    name, value = flag.split("=")
    error = refused(f"--{flag}")
    if hasattr(error, "field"):  # the model's own fields are checked by its family
        assert error.field == name.replace("-", "_")
        assert str(float(error.value)) == str(float(value))
    else:
        assert f"{name.replace('-', '_')} is " in str(error)


@pytest.mark.parametrize(
    "flag",
    [
        "d-model=2000000000",
        "vocab-size=2000000000",
        "max-target-length=1000000000",
        "max-source-length=2000000",
    ],
)
def test_a_batch_that_no_device_can_hold_is_refused_before_allocation(refused, flag):
    assert "GiB on each device" in str(refused(f"--{flag}"))


@pytest.mark.parametrize(
    "line,said",
    [
        ('{"source": "one", "targets": "abc"}', "'targets' is 'abc'; it must be a list"),
        ('{"source": "one", "targets": null}', "'targets' is None"),
        ('{"source": "one", "targets": {"a": "b"}}', "'targets' is {'a': 'b'}"),
        ('{"source": "one", "targets": [1]}', "'targets' is 1"),
        ('{"source": "one", "target": "x", "targets": 5}', "'targets' is 5"),
        ('{"source": null, "target": "x"}', "no text in field 'source'"),
        ('{"source": 5, "target": "x"}', "'source' is 5"),
        ('{"source": ["one"], "target": "x"}', "'source' is ['one']"),
        ('{"source": "one", "target": {"de": "x"}}', "'target' is {'de': 'x'}"),
        ('["one", "eins"]', "is ['one', 'eins']; a line of a .jsonl is an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"source": "\\ud800", "target": "x"}', "unpaired surrogate"),
        ('{"source": "one", "target": "x', "not JSON"),
        ("1" * 5000, "not JSON"),
    ],
    ids=lambda x: x[:40] if x.startswith(("{", "[")) else None,
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_line_that_is_no_example_is_named(refused, tmp_path, split, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    error = str(refused(f"--{split}={path}"))
    assert "bad.jsonl, line 2" in error and said in error


@pytest.mark.parametrize("split", ["train", "validation"])
def test_empty_and_damaged_splits_are_named(refused, tmp_path, split):
    (tmp_path / "empty.jsonl").touch()
    assert "empty.jsonl holds no examples" in str(refused(f"--{split}={tmp_path / 'empty.jsonl'}"))
    whole = gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in LINES))
    changed = whole[:30] + bytes(9) + whole[39:]
    for name, data in (("cut", whole[:-9]), ("changed", changed), ("text", b"one")):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        assert f"cannot read {path}" in str(refused(f"--{split}={path}"))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    for name, text in (("a.jsonl", '{"source": "one", "target": "eins"}\n'), ("a.tsv", "one\teins\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert list(texts(Task("", "", ""), str(tmp_path / name))) == [("one", "eins", ["eins"])]


def test_join_must_be_at_least_one(toy):
    for join in (0, -1):
        with pytest.raises(FieldError) as error:
            joined_examples(Task("", "", "", join=join), str(toy / "train.jsonl"))
        assert (error.value.field, error.value.value) == ("join", join)


@pytest.mark.parametrize(
    "flags,field,value",
    [
        (["--train=missing.jsonl"], "train", "missing.jsonl"),
        (["--validation=FOLDER"], "validation", "FOLDER"),
        (["--teacher-singles"], "teacher_singles", True),
        (["--teacher=runs/nowhere"], "teacher", "runs/nowhere"),
        (["--init=runs/nowhere"], "init", "runs/nowhere"),
        (["--tokenizer=None"], "tokenizer", None),
        (["--tokenizer=FOLDER"], "tokenizer", "FOLDER"),
        (["--tokenizer-size=2147483647"], "tokenizer_size", 2147483647),
        (["--teacher-outputs=x"], "teacher_outputs", "x"),
        (["--teacher-tokens"], "teacher_tokens", True),
        (["--on-policy=0.5"], "on_policy", 0.5),
        (["--output-dir=FILE"], "output_dir", "FILE"),
        (["--output-dir=FILE/run"], "output_dir", "FILE/run"),
        (["--output-dir=/proc/run"], "output_dir", "/proc/run"),
        (["--output-dir=gs://bucket/run"], "output_dir", "gs://bucket/run"),
        (["--export-dir=FILE"], "export_dir", "FILE"),
        (["--export-dir=RUN"], "export_dir", "RUN"),
        (["--ship"], "ship", True),
        (["--metric=accuracy"], "metric", "accuracy"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_files_and_folders_are_looked_at_first(refused, tmp_path, flags, field, value):
    """And no tokenizer is trained before."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()

    def filled(text):
        for name in ("file", "folder", "run"):
            text = text.replace(name.upper(), str(tmp_path / name))
        return text

    error = refused(f"--tokenizer={tmp_path / 'new.model'}", *map(filled, flags))
    assert names(error) == (field, filled(value) if isinstance(value, str) else value)
    assert (tmp_path / "file").read_text() == "kept" and not (tmp_path / "new.model").exists()


def test_another_checkpoint_is_not_trained_into(refused, t5_pair, tmp_path):
    """Its folder would be read as another format."""
    before = {path.name: path.read_bytes() for path in (t5_pair / "drafter").iterdir()}
    folder = str(t5_pair / "drafter")
    assert names(refused(f"--output-dir={folder}")) == ("output_dir", folder)
    assert names(refused(f"--init={folder}", f"--export-dir={folder}")) == ("export_dir", folder)
    assert {path.name: path.read_bytes() for path in (t5_pair / "drafter").iterdir()} == before


@pytest.mark.full
def test_an_unreachable_host_is_reported_at_once(toy, tmp_path):
    """Without TensorStore's own log, and before anything is made."""
    environment = os.environ | {"TENSORSTORE_GCS_HTTP_URL": "http://127.0.0.1:9", "JAX_PLATFORMS": "cpu"}
    for flag in ("--tokenizer", "--init", "--teacher"):
        began = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                str(SCRIPTS / "finetune.py"),
                f"--config={toy / 'toy.py'}",
                f"--output-dir={tmp_path / 'run'}",
                f"{flag}=gs://nobody/model",
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "gs://nobody/model" in done.stderr and "cannot be reached" in done.stderr
        assert (
            time.monotonic() - began < 30 and not (tmp_path / "run").exists()
        )  # imports; retries take minutes


def test_help_needs_no_config(capsys):
    with pytest.raises(SystemExit) as ended:
        finetune.main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "--learning-rate" in shown and "those of --config=" in shown


@pytest.mark.full
def test_parameters_that_are_no_numbers_are_never_saved(toy, tmp_path, capsys):
    """The loss of the only step is finite; what its update makes is not."""
    flags = ["--optimizer=adamw", "--learning-rate=3e38", "--weight-decay=1000"]
    assert finetune.main([f"--config={toy / 'toy.py'}", f"--output-dir={tmp_path / 'run'}", *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "not a number at step 1; nothing was saved yet" in error and "--learning-rate" in error
    assert not [*(tmp_path / "run").glob("best/[0-9]*"), *(tmp_path / "run").glob("latest/[0-9]*")]


@pytest.mark.full
def test_a_run_has_one_process(toy, refused, tmp_path):
    with locked(tmp_path / "run"):
        assert names(refused()) == ("output_dir", str(tmp_path / "run"))
    assert finetune.main([f"--config={toy / 'toy.py'}", f"--output-dir={tmp_path / 'run'}"]) == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(checkpoints.load(tmp_path / "run").params))
    assert not (tmp_path / "run" / "lock").exists()

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00002.safetensors").write_text("an earlier export's")
    export(tmp_path / "run", tmp_path / "out", None)  # takes its place file by file
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "spiece.model",
        "metrics.jsonl",
        "README.md",
    }
    checkpoints.load(tmp_path / "out")


@pytest.fixture(scope="module")
def teacher(t5_pair):
    checkpoint = checkpoints.load(t5_pair / "verifier")
    model, params = checkpoint.model, checkpoint.params
    return Cascade(
        (model, model),
        (params, params),
        Tokenizer(checkpoint.tokenizer_file()),
        max_source_length=16,
        max_new_tokens=4,
    )


def test_teacher_outputs_are_resumed_only_with_the_same_settings(toy, teacher, tmp_path):
    task = Task(str(toy / "train.jsonl"), "", "", max_source_length=16, max_target_length=4)
    path, part = tmp_path / "outputs.jsonl", tmp_path / "outputs.jsonl.part"
    settings = {"task": dataclasses.asdict(task), "count": 3}
    (tmp_path / "outputs.jsonl.part.settings.json").write_text(json.dumps(settings))

    def refuses(lines, said, **changes):
        part.write_text(lines)
        with pytest.raises(FieldError) as error:
            distillation.write_outputs(teacher, dataclasses.replace(task, **changes), path, count=3)
        assert part.read_text() == lines and not path.exists()
        assert (error.value.field, error.value.value) == ("teacher_outputs", str(part))
        assert said in error.value.problem
        return error.value.remedy

    for lines, said in (
        ('{"source": "elsewhere", "target": "x"}\n', "another source"),
        ("7\n", "no output"),
        ('{"source": "one two"}\n', "no output"),
        ("{\n", "not JSON"),
        ("null\n", "other settings"),
    ):
        changes = {"prefix": "translate: "} if "settings" in said else {}
        assert "--teacher-outputs" in refuses(lines, said, **changes)
    with OutputFile(part):
        assert "--teacher-outputs" in refuses("null\n", "is being written")
    with pytest.raises(FieldError) as refused:  # each is null
        distillation.write_outputs(teacher, task, path, count=3)
    assert (refused.value.field, refused.value.value) == ("max_target_length", 4)
    assert part.read_text() == "null\n" * 3 and not path.exists()


@pytest.mark.parametrize(
    "cluster",
    [
        "host:port,-1,0",
        "localhost:1234,-1,0",
        "localhost:1234,2,5",
        "localhost,1,0",
        ":,1,0",
        ":1234,1,0",
        "localhost:99999999,1,0",
        "localhost:0,1,0",
        "",
        ",,",
        "localhost:1234,2,-1",
        "localhost:1234,2",
    ],
)
def test_an_invalid_cluster_is_refused_at_once(refused, cluster):
    assert names(refused(f"--cluster={cluster}")) == ("cluster", cluster)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_missing_processes_are_awaited_and_named(refused, monkeypatch):
    """Where JAX itself would end the process, after five minutes, with a stack trace."""
    monkeypatch.setattr(cluster, "PATIENCE", 0.5)
    port = free_port()
    assert f"localhost:{port}, did not answer" in str(refused(f"--cluster=localhost:{port},2,1"))
    assert f"processes 1 and 2 of 3 did not come to port {port}" in str(
        refused(f"--cluster=localhost:{port},3,0")
    )
    for address in ("nowhere.invalid:1234,2,1", "auto"):
        assert names(refused(f"--cluster={address}")) == ("cluster", address)
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
        assert names(refused(f"--cluster=localhost:{port},1,0")) == ("cluster", port)


def test_the_processes_of_a_run_agree_on_who_they_are(monkeypatch):
    """Three meet, and a stranger, a second number 1 and one of another run among them do not stop it."""
    monkeypatch.setattr(cluster, "PATIENCE", 5.0)
    port, ended = free_port(), []

    def joins(processes, number):
        try:
            cluster._join(cluster.Place("localhost", port, processes, number))
            ended.append(number)
        except ValueError:
            ended.append("refused")

    threads = [threading.Thread(target=joins, args=who) for who in ((3, 1), (2, 1))]
    for thread in threads:
        thread.start()

    def last():
        time.sleep(0.5)
        address = "localhost", port
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=2) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            joins(3, 2)

    threads.append(threading.Thread(target=last))
    threads[-1].start()
    cluster._gather(port, 3)
    for thread in threads:
        thread.join()
    assert sorted(map(str, ended)) == ["1", "2", "refused"]


def test_a_damaged_log_stops_nothing(tmp_path):
    """A run's name is never read as a formula."""
    event = {"event": "log", "step": 1, "loss": 2.0}
    run = tmp_path / "cost_$x^$"
    run.mkdir()
    lines = [json.dumps(event), "7", "null", '{"step": "x"}', "[" * 100_000, '{"event": "log"']
    (run / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    assert read_events(run / "metrics.jsonl", 5) == [event]
    loss_curve(run)
    assert (run / "loss.png").stat().st_size > 1000


def test_the_check_of_parameters_detects_one_bad_number(toy):
    """Of all, NaN and infinity, in any array."""
    from speccascade_jax.config import load
    from speccascade_jax.models import model_of
    from speccascade_jax.parallel import make_mesh
    from speccascade_jax.training.optimizer import make_optimizer
    from speccascade_jax.training.steps import make_steps

    config = load(toy / "toy.py")
    steps = make_steps(model_of(config.model), config, make_optimizer(config), make_mesh())
    tree = {"a": jnp.zeros((4, 4)), "b": jnp.zeros(3), "count": jnp.int32(7)}
    assert steps.finite(tree)
    for bad in (math.nan, math.inf, -math.inf):
        assert not steps.finite(tree | {"b": tree["b"].at[2].set(bad)})
    assert not steps.finite(tree | {"a": tree["a"].at[3, 1].set(math.nan)})


def test_connect_names_its_argument():
    with pytest.raises(FieldError) as refused:
        connect("me")
    assert (refused.value.field, refused.value.value) == ("cluster", "me")
