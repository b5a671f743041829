"""What a run is made of: frozen dataclasses, and `load(name)` for the files in configs/."""

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import reprlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import tyro
from tyro.conf import AvoidSubcommands, Suppress, arg

from speccascade_jax.core.divergences import DIVERGENCES
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.rules import METHODS, TRAINED
from speccascade_jax.core.samplers.lookup import MODEL_FREE, split_drafter
from speccascade_jax.models import TrainedConfig
from speccascade_jax.settings import NAMED, NO_FILE, Choice, Settings, named, names_of
from speccascade_jax.vocabularies import VOCABULARIES, Vocabulary

DTYPES = "float32", "bfloat16", "int8"
LARGEST = 2**20
"""Bytes of a config file."""
LARGEST_BITS = 256
"""Of a whole number in a config: a float holds it, and it can be printed."""
LONGEST_SOURCE = 2**17
"""Tokens of an input."""
PREFIX_CACHE = 2**30
"""Bytes of what prompts begin with."""
PACKAGE = Path(__file__).resolve().parent
CONFIGS = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()),
    PACKAGE / "configs",
)
"""The configs that come with the package: inside an installed one, next to it in a checkout."""
DEMO = PACKAGE / "demo"
"""The pairs that come with the repository; of these, the wheel holds the pair `demo` only."""
ONLY_IN_THE_REPOSITORY = (
    "the package that pip installs holds only the pair demo; run this from a clone of the repository."
)
_SHARED = PACKAGE.parent.parent / "shared" / "data"
DATA = os.environ.get("SPECCASCADE_DATA") or str(_SHARED if _SHARED.is_dir() else Path("data"))
"""Where configs look for datasets: $SPECCASCADE_DATA, else ../shared/data next to the checkout where that
exists, else ./data."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A dataset: .jsonl or .tsv files, gzipped or not, or hf:// and tfds:// names (data.read_examples)."""

    train: str
    validation: str
    test: str
    source_field: str = "source"  # may be dotted: translation.en
    target_field: str = "target"
    references_field: str = "targets"  # optional: all references of an example
    metric: str = "bleu"  # of decoded texts: bleu, rouge1, rouge2, rougeLsum
    prefix: str = ""  # put before every source
    suffix: str = ""  # put after it: decoder-only models write the target after that
    max_source_length: int = 80  # tokens, the end-of-sequence token included
    max_target_length: int = 80
    join: int = 1  # one to this many random examples are joined into one


@dataclasses.dataclass(frozen=True)
class ExitTraining:
    """How a network's members are trained, where the model is one (models.exits, models.shared_encoder,
    models.eagle).

    The small members learn from the full model as a drafter does from its teacher: `distillation`,
    `divergence`, `method` and `alpha` of the run say how.
    """

    frozen: bool = True  # the full model stays as it is; False: all train together (LayerSkip)
    layer_dropout: float = 0.0  # how often the last decoder layer is left out, the ones below less often
    exit_weight: float = 0.2  # weight of the exits' losses if the full model is trained, too
    # the exits that train at a step: all, one in turn (rotational), the deepest first and more with time
    # (gradual)
    curriculum: str = "all"
    drafter: str | None = None  # checkpoint whose decoder one that reads its verifier's encoder begins as
    # an EAGLE-3 head learns from drafts of its own up to this length (training-time test)
    ahead: int = 7


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One fine-tuning run, from scratch or from `init`."""

    name: str
    output_dir: str
    model: AvoidSubcommands[TrainedConfig]
    task: Task
    # its file (or at gs://), trained on the task where it is missing; None: that of `init`
    tokenizer: str | None = None
    tokenizer_size: int = 4096  # pieces, if it has to be trained
    tokenizer_pieces: str = "unigram"  # or bpe, char or word: tokenizer.PIECES; rare characters are bytes
    init: str | None = None  # checkpoint to start from
    teacher: str | None = None  # checkpoint to learn from, in addition to the data
    distillation: float = 0.5  # weight of the divergence from the teacher; the rest is the data's loss
    divergence: Annotated[
        str,
        tyro.conf.arg(
            help="From the teacher's distribution. "
            + ". ".join(f"{name}: {entry.summary}" for name, entry in DIVERGENCES.items())
            + "."
        ),
    ] = "kl"
    # the rule that will decode with the drafter, of decode.py --list: the drafter learns what its tokens are
    # then verified against (at temperature 1) instead of the teacher's distribution
    method: str = "speculative"
    alpha: float = 0.0  # that rule's lenience
    # share of the batches whose targets the model samples itself: of them it learns the teacher's
    # distributions alone
    on_policy: float = 0.0
    # .jsonl to train on instead of the targets: the teacher's own outputs, decoded once where the file is
    # missing; those of the validation split, on which the loss is computed, are next to it
    teacher_outputs: str | None = None
    teacher_examples: int | None = None  # the most of them that are used
    teacher_singles: bool = False  # each is of one example; they are joined again in every epoch
    # split targets into the teacher's tokens, each spelled in the drafter's tokens: with tli, a drafter reads
    # committed tokens in this form
    teacher_tokens: bool = False
    # the best parameters go here as a Hugging Face folder, bfloat16; None: to `export` in output_dir, where
    # that format holds such a model
    export_dir: str | None = None
    shipped: Suppress[str | None] = None  # what `finetune.py --ship` writes, in speccascade_jax/demo
    steps: int = 10_000
    batch_tokens: int = 2048  # positions a batch, of the longer side, padding included
    accumulate: int = 1  # batches a step
    optimizer: str = "adafactor"  # or adamw or muon, whose updates are scaled by each array's RMS
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay: str = "constant"  # or linear, to zero
    weight_decay: float = 0.0  # adamw's
    label_smoothing: float = 0.0
    z_loss: float = 1e-4
    clip_norm: float | None = None  # largest norm of a step's gradient
    dtype: str = "bfloat16"  # of the matrix products; parameters stay float32
    split_parameters: bool = False  # FSDP: parameters and optimizer state cut over the devices
    remat: bool = False  # recompute each layer in the backward pass: less memory, slower
    eval_every: int = 500
    save_every: int = 500
    log_every: int = 50
    validation_examples: int = 256  # decoded for task.metric at every evaluation; 0 for none
    seed: int = 0
    # of adapters, trained next to the parameters of `init`, which stay as they are; 0: all parameters are
    # trained
    lora_rank: int = 0
    lora_alpha: float = 16.0  # what an adapter adds is multiplied by lora_alpha / lora_rank
    # which matrices have an adapter, by their names in models/ (query, up, ...); empty: all of the layers'
    lora_kernels: tuple[str, ...] = ()
    lora_base: str = "float32"  # the dtype of `init`'s parameters in training; or bfloat16
    exits: ExitTraining = dataclasses.field(default_factory=ExitTraining)

    @property
    def folders(self) -> tuple[str, ...]:
        """Every folder that its model may lie in."""
        export = self.export_dir or str(Path(self.output_dir, "export"))
        return (self.output_dir, export, *([] if self.shipped is None else [str(DEMO / self.shipped)]))


@dataclasses.dataclass(frozen=True)
class LearnedRuleConfig:
    """How a learned method of a pair, `router` or `learned_mixture`, is trained."""

    name: str
    output: str  # the .json file it is written to, which --router reads
    pair: str  # the config of the two models
    method: Literal[TRAINED] = TRAINED[0]
    task: str | None = None  # the training config whose texts it learns from; None: the pair's
    # train, validation or test. Texts that the models were trained on show too few of their errors
    split: str = "validation"
    temperatures: tuple[float, ...] = (0.0, 1.0)  # a router learns to defer at each of these,
    top_ps: tuple[float, ...] = (1.0, 0.3)  # with each of these truncations; a mixture at 1 and 1
    places: int = 2  # of each text, where both models' tokens are tried (a router)
    examples: int = 1000  # the most texts; every fifth of them is held out
    dtype: str = "auto"  # of both models in training: float32, bfloat16, int8, or auto
    width: int = 16  # hidden units
    steps: int = 300
    learning_rate: float = 0.01
    seed: int = 0
    shipped: Suppress[str | None] = None  # what `finetune.py --ship` writes, in speccascade_jax/demo

    def check(self) -> None:
        """Raises FieldError for a value out of its range."""
        check_usable(self)
        if not METHODS[self.method].defers:
            for field in ("temperatures", "top_ps", "places"):
                if getattr(self, field) != getattr(type(self), field):
                    raise FieldError(
                        field, getattr(self, field), "leave it out: only a rule that defers reads it."
                    )
        for field in ("places", "examples", "width", "steps"):
            if not 1 <= getattr(self, field) <= 10**6:
                raise FieldError(field, getattr(self, field), "it must be in [1, 1000000].")
        if not 0 < self.learning_rate < math.inf:
            raise FieldError("learning_rate", self.learning_rate, "it must be above 0.")
        if not 0 <= self.seed < 2**63:
            raise FieldError("seed", self.seed, "it must be in [0, 2**63).")
        for field, low, high in (("temperatures", 0.0, math.inf), ("top_ps", sys.float_info.min, 1.0)):
            values = getattr(self, field)
            if not values or not all(low <= value <= high and value < math.inf for value in values):
                raise FieldError(
                    field,
                    values,
                    "give one value or more, " + ("of at least 0." if high > 1 else "above 0 and at most 1."),
                )
        if self.split not in ("train", "validation", "test"):
            raise FieldError(
                "split", self.split, "known: train, validation, test.", f"unknown split {self.split!r}"
            )
        if not self.output.endswith(".json"):
            raise FieldError("output", self.output, "a trained rule's file ends in .json.")


RouterConfig = LearnedRuleConfig  # what configs of earlier versions import


DRAFTER_HELP = "; ".join(
    (
        "checkpoint folder of the small model",
        "FOLDER@NAME: a member of a network",
        *(
            f"{name}: no model, but {entry.summary}; {name}+FOLDER: that or the model, round by round"
            for name, entry in MODEL_FREE.items()
        ),
    )
)
VOCABULARY_HELP = "how a drafter of another vocabulary drafts. " + "; ".join(
    f"{name}: {strategy.summary if name == strategy.name else strategy.name}"
    for name, strategy in VOCABULARIES.items()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(Settings):
    """A cascade and how it decodes; every field, those of Settings too, is a flag of scripts/decode.py."""

    drafter: Annotated[str, arg(help=DRAFTER_HELP)] = ""
    verifier: str = ""  # checkpoint folder of the large model
    models: tuple[str, ...] = ()  # instead of these two: one or more folders, the smallest model's first
    # of --list, or verifier / drafter alone; or one a level. An object in its place moves to `samplers`
    method: Annotated[Choice | tuple[Choice, ...], arg(constructor=str | tuple[str, ...])] = "speculative"
    max_new_tokens: int = 80  # the end-of-sequence token included
    batch_size: int = 1  # inputs decoded side by side; from 2 on, on each device
    max_source_length: int = 80  # tokens, the end-of-sequence token included
    truncate: bool = False  # cut longer inputs instead of refusing them
    prefix: str = ""  # put before every input
    suffix: str = ""  # put after it, for decoder-only models: what their output follows
    chat: bool = False  # each input is what a user says, in the models' own chat templates
    tokenizer: str | None = None  # spiece.model or tokenizer.json, where the checkpoints have none
    router: str | None = None  # the trained network's file, of the methods router and learned_mixture
    vocabulary: Annotated[Vocabulary, arg(help=VOCABULARY_HELP)] = "auto"
    tensor_parallel: int = 1  # devices that share each model's parameters
    # bytes on each device for what prompts begin with, so that decoder-only models read it once; 0: none
    prefix_cache_bytes: int = PREFIX_CACHE
    dtype: str = "auto"  # of weights and products: float32, bfloat16, int8; auto: float32 on CPUs
    # For configs only, no flags:
    # Further names of methods: rules, samplers, or functions from the models, the smallest first, to one.
    samplers: Suppress[Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    task: Suppress[str | None] = None  # the training config whose task it is scored on
    missing: Suppress[str] = ""  # what to do where a checkpoint is missing, for people
    examples: Suppress[tuple[str, ...]] = ()  # decoded when no input is given
    planned_for: Suppress[tuple[str, ...]] = ()  # of a plan: the models that its block sizes are for

    def __post_init__(self) -> None:
        if not self.models and not (self.drafter and self.verifier):
            raise FieldError("models", self.models, "name a drafter and a verifier, or models.", "no models")
        method, samplers = names_of(self.method, self.samplers)
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "samplers", samplers)

    @property
    def roles(self) -> list[tuple[str, str]]:
        """What each model is called, and its checkpoint, the smallest first."""
        if self.models:
            return [(f"model {n}", path) for n, path in enumerate(self.models)]
        return [("the drafter", self.drafter), ("the verifier", self.verifier)]

    @property
    def folders(self) -> list[tuple[str, str]]:
        """The roles whose models are read from a checkpoint, and its folder."""
        return [(role, folder) for role, path in self.roles if (folder := split_drafter(path)[1])]

    def record(self, *without: str) -> dict[str, Any]:
        """Its fields as JSON holds them, without these: what an output was decoded by."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in without}
        samplers = {name: _described(made) for name, made in self.samplers.items()}
        del fields["samplers"]
        return fields | ({"samplers": samplers} if samplers else {})

    @property
    def settings(self) -> Settings:
        """How each text is decoded."""
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})

    @property
    def _known(self) -> Mapping[str, Any]:
        return {**NAMED, **named(self.samplers)}

    def check(
        self, vocab_size: float = math.inf, levels: int | None = None, known: Mapping[str, Any] = NAMED
    ) -> None:
        """Raises ValueError for a value out of its range: what can be told before models are loaded."""
        check_usable(self)
        levels, paths = len(self.roles) - 1, tuple(path for _, path in self.roles)
        if self.planned_for and paths != self.planned_for:
            raise FieldError(
                "models",
                paths,
                "plan for these with scripts/plan.py.",
                f"this is a plan for the models {', '.join(self.planned_for)}, not for {', '.join(paths)}",
            )
        for n, (role, path) in enumerate(self.roles):
            model_free, folder = split_drafter(path)
            field = "models" if self.models else role.removeprefix("the ")
            if model_free is not None and (n > 0 or levels == 0):
                remedy = "name it before the models that verify its drafts."
                raise FieldError(field, path, remedy, f"{role} is {path}, which only drafts")
            if model_free is not None and folder and levels > 1:
                remedy = f"name {model_free.name} and {folder} one after the other."
                raise FieldError(field, path, remedy, f"{path} drafts for one verifier, not for {levels}")
        super().check(vocab_size, levels, {**known, **self._known})
        if self.router is None and (untrained := set(TRAINED) & set(self.of_levels("method", levels))):
            raise FieldError(
                "method", min(untrained), NO_FILE, f"method {min(untrained)} is a trained network"
            )
        for name in ("batch_size", "max_new_tokens", "tensor_parallel"):
            if not 1 <= getattr(self, name) < 2**31:
                raise FieldError(name, getattr(self, name), "it must be at least 1, and below 2**31.")
        if not 0 <= self.prefix_cache_bytes < 2**63:
            raise FieldError(
                "prefix_cache_bytes", self.prefix_cache_bytes, "it must be at least 0, and below 2**63."
            )
        if not 1 <= self.max_source_length <= LONGEST_SOURCE:
            raise FieldError(
                "max_source_length",
                self.max_source_length,
                f"it must be at least 1, and at most {LONGEST_SOURCE}.",
            )
        for alpha, block_size in zip(self.of_levels("alpha", levels), self.block_sizes(levels), strict=True):
            if math.isnan(alpha):  # which no range of a method's excludes where a single model decodes
                raise FieldError("alpha", alpha, "give a number.")
            if block_size > max(self.max_new_tokens, 100):  # what is drafted past a text's end is lost
                field = "max_block_size" if self.adaptive else "block_size"
                raise FieldError(
                    field, block_size, f"lower it: a text has at most max_new_tokens, {self.max_new_tokens}."
                )
        if self.vocabulary not in VOCABULARIES:
            raise FieldError("vocabulary", self.vocabulary, f"known: {', '.join(VOCABULARIES)}.")
        if self.dtype != "auto":  # which devices there are is not asked for here
            dtype_of(self)


def _described(made: Any) -> str:
    """A sampler or rule by the name of its function, with the values that are bound to it."""
    function = made.target if isinstance(made, Method) else made
    if isinstance(function, functools.partial):
        return f"{_described(function.func)} {function.keywords}"
    return getattr(function, "__qualname__", type(function).__qualname__)


def dtype_of(config: DecodeConfig) -> str:
    """The dtype of a config's weights here. Raises ValueError for an unknown one."""
    if config.dtype == "auto":
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if config.dtype not in DTYPES:
        raise FieldError("dtype", config.dtype, f"known: auto, {', '.join(DTYPES)}.")
    return config.dtype


def available() -> dict[str, Path]:
    """Name -> file of every config that comes with the package, and of those in ./configs."""
    return {
        path.stem: path
        for folder in (CONFIGS, Path("configs"))
        for path in sorted(folder.glob("*.py"))
        if not path.stem.startswith("_") and path.is_file()
    }


def in_the_repository_only(path: str | Path) -> bool:
    """Whether `path`, of a file or folder that is missing here, is one that the repository has."""
    return Path(path).is_relative_to(DEMO) and CONFIGS.parent == PACKAGE


class ConfigError(ValueError):
    """A config file that cannot be used; the message names it."""


def path_of(name: str | Path) -> Path:
    """The file of a config: a name in configs/, or a path. Raises ConfigError with the nearest known one."""
    path = Path(name) if str(name).endswith(".py") else available().get(str(name))
    if path is None or not os.path.isfile(path):
        known = available()
        near = difflib.get_close_matches(str(name)[:100], known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"no config {str(name)!r}{hint} Known: {', '.join(known) or 'none'}.")
    return path


def load(name: str | Path, kind: Any = None) -> Any:
    """The `config` of a file in configs/, or of the file at path `name`; a `kind` where one is asked for.

    Raises ConfigError for whatever is wrong with it.
    """
    path = path_of(name)
    config = _run(path).get("config")
    if config is None:
        raise ConfigError(f"{path} defines no `config`.")
    if not isinstance(config, DecodeConfig | TrainConfig | LearnedRuleConfig):
        raise ConfigError(
            f"{path}: its `config` is {reprlib.repr(config)}; it must be a DecodeConfig, a "
            "TrainConfig or a LearnedRuleConfig."
        )
    for wrong in _wrong_fields(config):
        raise ConfigError(f"{path}: {wrong}.")
    if kind is not None and not isinstance(config, kind):
        raise ConfigError(f"config {name} {_other_kind(str(name), config)}")
    return config


def _run(path: Path) -> dict[str, Any]:
    """What a config file defines. What it prints goes to stderr."""
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes: it is no config.")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return runpy.run_path(str(path))
    except ConfigError:  # of another config, which this one loads
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f" while {path} ran") from None
    except BaseException as error:  # sys.exit() too: any code may stand in a config
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        said = str(error) if isinstance(error, FieldError) else traceback.format_exception_only(error)[-1]
        said = " ".join(said[:300].split())
        raise ConfigError(f"{path}{f', line {lines[-1]}' if lines else ''}: {said.rstrip('.')}.") from None


def _wrong_fields(config: Any) -> Iterator[str]:
    """Each field of a dataclass, and of those within, that holds another type than it should, or what no
    program can work with."""
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name, None)
        if unusable := _unusable(value):
            yield f"{name} {unusable}"
        elif not _fits(value, kind):
            wanted = f"its type is {_named(kind)}"
            if get_origin(kind) is Literal:
                wanted = f"known: {', '.join(get_args(kind))}"
            yield f"{name} is {reprlib.repr(value)}; {wanted}"
        elif dataclasses.is_dataclass(value):
            yield from _wrong_fields(value)


def _unusable(value: Any) -> str:
    """What is wrong with a text or a number that its type allows; nothing where it can be used."""
    values = value if isinstance(value, tuple) else (value,)
    for text in values:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            return f"is {text[:50]!a}, which holds half a character: give whole ones"
        if isinstance(text, int) and text.bit_length() > LARGEST_BITS:
            return f"is a whole number of {text.bit_length()} bits: give a smaller one"
    return ""


def check_usable(config: Any) -> None:
    """Raises FieldError for a field's text or number that no program can work with."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if unusable := _unusable(value):
            raise FieldError(
                field.name,
                None if isinstance(value, int) else value,
                "change it.",
                f"{field.name} {unusable}",
            )


def _named(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_named, get_args(kind)))
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, get_args(kind)))
    return str(kind) if get_origin(kind) else getattr(kind, "__name__", str(kind)).replace("NoneType", "None")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(kind))
    if get_origin(kind) is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_fits(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind in (int, float):  # True is an int to Python
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _other_kind(name: str, config: Any) -> str:
    """What a config of the wrong kind is, and which one may be meant."""
    if isinstance(config, LearnedRuleConfig):
        return f"trains the method {config.method}; its pair is {config.pair}."
    if isinstance(config, DecodeConfig):
        hint = f"; name {config.task}" if config.task else ""
        return f"is a pair to decode with, not a training run{hint}."
    folders = {str(Path(folder)) for folder in config.folders}
    users = []
    for other in available():
        with contextlib.suppress(ConfigError):
            pair = load(other)
            if isinstance(pair, DecodeConfig) and (
                pair.task == name
                or any(
                    not folders.isdisjoint((path, *map(str, Path(path).parents))) for _, path in pair.roles
                )
            ):
                users.append(other)
    hint = f"; one that uses it: {users[0]}" if users else ""
    return f"is a training run, not a pair to decode with{hint}."
