"""Configs: frozen dataclasses for training and decoding, and `load(name)` for the files in configs/."""

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
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import AvoidSubcommands, Suppress, arg

from speccascade_jax.core.divergences import DIVERGENCES
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.rules import METHODS, TRAINED
from speccascade_jax.core.samplers.lookup import MODEL_FREE, split_drafter
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.models import TrainedConfig
from speccascade_jax.models.dtypes import DTYPES, automatic_dtype
from speccascade_jax.settings import NAMED, NO_FILE, Choice, Settings, named, names_of
from speccascade_jax.vocabularies import VOCABULARIES, Vocabulary

LARGEST = 2**20
"""The largest size of a config file, in bytes."""
LARGEST_BITS = 256
"""The largest size of an integer in a config: it fits a float and can be printed."""
LONGEST_SOURCE = 2**17
"""The largest --max-source-length."""
PREFIX_CACHE = 2**30
"""The default memory for shared prompt prefixes, in bytes per device."""
PACKAGE = Path(__file__).resolve().parent
CONFIGS = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()),
    PACKAGE / "configs",
)
"""The configs that come with the package: inside an installed package, next to it in a checkout."""
DEMO = PACKAGE / "demo"
"""The pairs that come with the repository; the wheel contains only the pair `demo`."""
ONLY_IN_THE_REPOSITORY = (
    "the installed package contains only the pair demo; run this from a clone of the repository."
)
_SHARED = PACKAGE.parent.parent / "shared" / "data"
DATA = os.environ.get("SPECCASCADE_DATA") or str(_SHARED if _SHARED.is_dir() else Path("data"))
"""The folder of datasets: $SPECCASCADE_DATA, else ../shared/data next to the checkout if that exists, else
./data."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A dataset: .jsonl or .tsv files, optionally gzipped, or hf:// and tfds:// names."""

    # The training split.
    train: str
    # The validation split.
    validation: str
    # The test split.
    test: str
    # The field of the source text. Dots select nested fields: translation.en.
    source_field: str = "source"
    # The field of the target text. Dots select nested fields: translation.de.
    target_field: str = "target"
    # An optional field with a list of all references of an example.
    references_field: str = "targets"
    # The metric of decoded texts: bleu, rouge1, rouge2, rougeLsum or exact_match.
    metric: str = "bleu"
    # Text inserted before every source.
    prefix: str = ""
    # Text appended to every source. Decoder-only models write the target after it.
    suffix: str = ""
    # The most tokens of a source, including the end-of-sequence token.
    max_source_length: int = 80
    # The most tokens of a target, including the end-of-sequence token.
    max_target_length: int = 80
    # Join between one and this many random examples into one.
    join: int = 1


@dataclasses.dataclass(frozen=True)
class ExitTraining:
    """How the members of a network are trained: exits, a drafter on a shared encoder, or an EAGLE-3 head.

    The small members learn from the full model as a drafter learns from its teacher: --distillation,
    --divergence, --method and --alpha apply to them.
    """

    # Freeze the full model. Otherwise all members train together (LayerSkip).
    frozen: bool = True
    # How often the last decoder layer is skipped in training. Lower layers are skipped less often.
    layer_dropout: float = 0.0
    # The weight of the exits' losses if the full model is trained, too.
    exit_weight: float = 0.2
    # The exits that train at each step: `all`, `rotational` for one at a time in turn, or `gradual` to start
    # with the deepest exit and add the others over time.
    curriculum: str = "all"
    # A checkpoint whose decoder initialises a drafter that reads its verifier's encoder. None: a slice of the
    # verifier initialises it.
    drafter: str | None = None
    # The largest length of an EAGLE-3 head's own drafts that it learns from (training-time test).
    ahead: int = 7


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run, from scratch or from --init."""

    # The name of the run, for logs and plots.
    name: str
    # The folder of the run: checkpoints, logs and the export.
    output_dir: str
    # The model, and its size.
    model: AvoidSubcommands[TrainedConfig]
    # The dataset: .jsonl or .tsv files, optionally gzipped, or hf:// and tfds:// names.
    task: Task
    # Tokenizer file, local or gs://. If it does not exist, it is trained on the task. None uses the tokenizer
    # of --init.
    tokenizer: str | None = None
    # The number of pieces of a tokenizer that is trained.
    tokenizer_size: int = 4096
    # The kind of a tokenizer that is trained: unigram, bpe, char or word. Rare characters are encoded as
    # bytes.
    tokenizer_pieces: str = "unigram"
    # The checkpoint to start from. None trains from scratch.
    init: str | None = None
    # A checkpoint to learn from (distillation), in addition to the data.
    teacher: str | None = None
    # The weight of the divergence from the teacher; the data's loss has the remaining weight.
    distillation: float = 0.5
    divergence: Annotated[
        str,
        tyro.conf.arg(
            help="The divergence from the teacher's distribution. "
            + "; ".join(f"{name}: {entry.summary}" for name, entry in DIVERGENCES.items())
            + "."
        ),
    ] = "kl"
    # The rule that will decode with the drafter (see --list of the decode command). The drafter learns the
    # distribution that its tokens will be verified against at temperature 1, instead of the teacher's.
    method: str = "speculative"
    # The lenience of that rule.
    alpha: float = 0.0
    # The fraction of batches whose targets are sampled from the model itself. On these it learns from the
    # teacher's distributions only.
    on_policy: float = 0.0
    # A .jsonl file of the teacher's outputs to train on instead of the targets. If it does not exist, the
    # teacher decodes it first. The outputs for the validation split, on which the loss is computed, are next
    # to it.
    teacher_outputs: str | None = None
    # Use at most this many of the teacher's outputs. None uses all.
    teacher_examples: int | None = None
    # Decode one example per output and join outputs again in every epoch.
    teacher_singles: bool = False
    # Split targets into the teacher's tokens and spell each one in the drafter's tokens, the form in which a
    # drafter of another vocabulary reads committed tokens with tli.
    teacher_tokens: bool = False
    # How many epochs are prepared; later ones repeat their batches. What the teacher, or a network's frozen
    # full model, computes for these batches is kept on disk until the run ends, and need not be computed
    # again. 0 keeps nothing, and no two epochs have the same batches.
    kept_epochs: int = 0
    # The folder for the best parameters, in Hugging Face format and bfloat16. None uses `export` in
    # --output-dir if that format supports the model.
    export_dir: str | None = None
    shipped: Suppress[str | None] = None  # what `finetune.py --ship` writes, in speccascade_jax/demo
    # The number of optimizer steps.
    steps: int = 10_000
    # Positions per batch, counted on the longer of source and target, including padding.
    batch_tokens: int = 2048
    # Batches per optimizer step (gradient accumulation).
    accumulate: int = 1
    # The optimizer: adafactor, adamw or muon. The updates of muon are scaled by each array's RMS.
    optimizer: str = "adafactor"
    # The largest learning rate, reached after the warm-up.
    learning_rate: float = 1e-3
    # Steps of linear warm-up.
    warmup_steps: int = 0
    # The learning rate after the warm-up: `constant`, or `linear` decay to zero.
    decay: str = "constant"
    # The weight decay of adamw.
    weight_decay: float = 0.0
    # The probability mass of each target that is spread over all tokens.
    label_smoothing: float = 0.0
    # The weight of the squared log normaliser of the logits in the loss.
    z_loss: float = 1e-4
    # Clip the gradient of a step to this norm. None does not clip.
    clip_norm: float | None = None
    # The dtype of matrix products: bfloat16 or float32. Parameters are float32.
    dtype: str = "bfloat16"
    # Split parameters and optimizer state over the devices (FSDP).
    split_parameters: bool = False
    # Recompute each layer in the backward pass, which takes less memory and more time.
    remat: bool = False
    # Steps between two evaluations.
    eval_every: int = 500
    # Steps between two saves.
    save_every: int = 500
    # Steps between two lines of the log.
    log_every: int = 50
    # The number of validation examples to decode for the metric at every evaluation. 0 decodes none.
    validation_examples: int = 256
    # The random seed.
    seed: int = 0
    # The rank of LoRA adapters; the parameters of --init remain frozen. 0 trains all parameters.
    lora_rank: int = 0
    # The contribution of an adapter is multiplied by lora_alpha / lora_rank.
    lora_alpha: float = 16.0
    # The matrices with an adapter, by name (query, up, ...). If empty, all matrices of the layers have one.
    lora_kernels: tuple[str, ...] = ()
    # The dtype of the frozen parameters of --init: float32 or bfloat16.
    lora_base: str = "float32"
    # Training of the small members of a network (exits, a drafter on a shared encoder, or an EAGLE-3
    # head). They learn from the full model as a drafter learns from its teacher: --distillation,
    # --divergence, --method and --alpha apply to them.
    exits: ExitTraining = dataclasses.field(default_factory=ExitTraining)

    @property
    def folders(self) -> tuple[str, ...]:
        """Every folder that its model may be in."""
        export = self.export_dir or str(Path(self.output_dir, "export"))
        return (self.output_dir, export, *([] if self.shipped is None else [str(DEMO / self.shipped)]))


@dataclasses.dataclass(frozen=True)
class LearnedRuleConfig:
    """How a learned method of a pair, `router` or `learned_mixture`, is trained."""

    # The name of the run, for logs.
    name: str
    # The .json file to write; pass it to --router.
    output: str
    # The config of the two models.
    pair: str
    # The method to train.
    method: Literal[TRAINED] = TRAINED[0]
    # The training config whose texts to learn from. None uses the pair's task.
    task: str | None = None
    # train, validation or test. Models make too few errors on texts that they were trained on.
    split: str = "validation"
    # Temperatures to train a router at, each combined with every --top-ps. A mixture is trained at
    # temperature 1.
    temperatures: tuple[float, ...] = (0.0, 1.0)
    # Values of top_p to train a router at. A mixture is trained without truncation.
    top_ps: tuple[float, ...] = (1.0, 0.3)
    # Positions per text at which a router's training tries both models' tokens.
    places: int = 2
    # The most texts to learn from. Every fifth of them is held out.
    examples: int = 1000
    # The dtype of both models during training: float32, bfloat16, int8, or auto (bfloat16 on accelerators and
    # on CPUs that multiply it, otherwise float32).
    dtype: str = "auto"
    # The number of hidden units.
    width: int = 16
    # The number of optimizer steps.
    steps: int = 300
    # The learning rate.
    learning_rate: float = 0.01
    # The random seed.
    seed: int = 0
    shipped: Suppress[str | None] = None  # what `finetune.py --ship` writes, in speccascade_jax/demo

    def check(self) -> None:
        """Raises FieldError for a value out of range."""
        check_usable(self)
        if not METHODS[self.method].defers:
            for field in ("temperatures", "top_ps", "places"):
                if getattr(self, field) != getattr(type(self), field):
                    raise FieldError(field, getattr(self, field), "leave it out: only the router reads it.")
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
                    "give one or more values " + ("of at least 0." if high > 1 else "above 0 and at most 1."),
                )
        if self.split not in ("train", "validation", "test"):
            raise FieldError(
                "split", self.split, "known: train, validation, test.", f"unknown split {self.split!r}"
            )
        if not self.output.endswith(".json"):
            raise FieldError("output", self.output, "its name must end in .json.")


RouterConfig = LearnedRuleConfig  # the name in earlier versions, which configs may import


DRAFTER_HELP = " ".join(
    (
        "The small model's checkpoint folder. FOLDER@NAME selects one member of a network.",
        *(
            f"`{name}` drafts {entry.summary}, without a model. {name}+FOLDER chooses in each round."
            for name, entry in MODEL_FREE.items()
        ),
    )
)
VOCABULARY_HELP = "How a drafter with another vocabulary drafts. " + " ".join(
    f"{name}: {strategy.summary if name == strategy.name else strategy.name}."
    for name, strategy in VOCABULARIES.items()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(Settings):
    """The models and how they decode. The fields of --config are the defaults."""

    drafter: Annotated[str, arg(help=DRAFTER_HELP)] = ""
    # The large model's checkpoint folder.
    verifier: str = ""
    # Use these models instead of --drafter and --verifier: one or more folders, smallest model first.
    models: tuple[str, ...] = ()
    # A method from --list of the decode command, or `verifier` or `drafter` to run one model alone. With
    # three or more models, give one method, or one per verifier.
    method: Annotated[Choice | tuple[Choice, ...], arg(constructor=str | tuple[str, ...])] = "speculative"
    # The most tokens of an output, including the end-of-sequence token.
    max_new_tokens: int = 80
    # The number of inputs decoded together. Values above 1 count inputs per device.
    batch_size: int = 1
    # The most tokens of an input, including the end-of-sequence token.
    max_source_length: int = 80
    # Truncate longer inputs instead of rejecting them.
    truncate: bool = False
    # Text inserted before every input.
    prefix: str = ""
    # Text appended to every input (decoder-only models); the output starts right after it.
    suffix: str = ""
    # Treat each input as a user's message, formatted with the models' own chat templates.
    chat: bool = False
    # Tokenizer file (spiece.model or tokenizer.json) for checkpoints without one.
    tokenizer: str | None = None
    # The trained file that the methods `router` and `learned_mixture` read.
    router: str | None = None
    # Texts that --drafter lookup also searches, such as earlier outputs: a .txt file with one text per line,
    # or a .jsonl file with a field `text`, as the decode command writes it, or `target`.
    lookup_texts: str | None = None
    vocabulary: Annotated[Vocabulary, arg(help=VOCABULARY_HELP)] = "auto"
    # The number of devices that share each model's parameters.
    tensor_parallel: int = 1
    # Bytes of memory per device for caching shared prompt prefixes, so that decoder-only models read them
    # once. 0 disables the cache.
    prefix_cache_bytes: int = PREFIX_CACHE
    # The dtype of weights and matrix products: float32, bfloat16, int8, or auto (bfloat16 on accelerators and
    # on CPUs that multiply it, otherwise float32).
    dtype: str = "auto"
    # The following fields are for config files only; they are not flags.
    # Further methods by name: rules, samplers, or functions from the models, smallest first, to a sampler.
    # An object given as `method` is added here.
    samplers: Suppress[Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    task: Suppress[str | None] = None  # the training config whose task scores the outputs
    missing: Suppress[str] = ""  # a hint that is shown if a checkpoint is missing
    examples: Suppress[tuple[str, ...]] = ()  # decoded if no input is given
    planned_for: Suppress[tuple[str, ...]] = ()  # in a plan: the models that its block sizes are for

    def __post_init__(self) -> None:
        if not self.models and not (self.drafter and self.verifier):
            raise FieldError("models", self.models, "name a drafter and a verifier, or models.", "no models")
        method, samplers = names_of(self.method, self.samplers)
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "samplers", samplers)

    @property
    def roles(self) -> list[tuple[str, str]]:
        """The name and checkpoint of each model, smallest first."""
        if self.models:
            return [(f"model {n}", path) for n, path in enumerate(self.models)]
        return [("the drafter", self.drafter), ("the verifier", self.verifier)]

    @property
    def models_alone(self) -> tuple[str, ...]:
        """The methods by which one model decodes alone, the verifier's first: those whose model has a
        checkpoint."""
        paths = [path for _, path in self.roles]
        return tuple(
            name
            for name, scheme in SINGLE_MODEL.items()
            if scheme.model is not None and split_drafter(paths[scheme.model])[1]
        )

    @property
    def folders(self) -> list[tuple[str, str]]:
        """The name and checkpoint folder of each model that is read from a checkpoint."""
        return [(role, folder) for role, path in self.roles if (folder := split_drafter(path)[1])]

    @property
    def files(self) -> dict[str, str | None]:
        """The files that are read besides checkpoints, by flag."""
        return {
            "--tokenizer": self.tokenizer,
            "--router": self.router,
            "--lookup-texts": self.lookup_texts,
        }

    def record(self, *without: str) -> dict[str, Any]:
        """The fields as JSON values, without these: a record of how an output was decoded."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in without}
        samplers = {name: _described(made) for name, made in self.samplers.items()}
        del fields["samplers"]
        return fields | ({"samplers": samplers} if samplers else {})

    def on_this_machine(self) -> Self:
        """The config with the dtype that `auto` means here, so that a record of it says which it was."""
        return dataclasses.replace(self, dtype=dtype_of(self))

    @property
    def settings(self) -> Settings:
        """The settings of each text."""
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})

    @property
    def _known(self) -> Mapping[str, Any]:
        return {**NAMED, **named(self.samplers)}

    def check(
        self, vocab_size: float = math.inf, levels: int | None = None, known: Mapping[str, Any] = NAMED
    ) -> None:
        """Raises ValueError for a value out of range, as far as it can be checked before models are
        loaded."""
        check_usable(self)
        levels, paths = len(self.roles) - 1, tuple(path for _, path in self.roles)
        if self.planned_for and paths != self.planned_for:
            raise FieldError(
                "models",
                paths,
                "plan for these models with scripts/plan.py.",
                f"this is a plan for the models {', '.join(self.planned_for)}, not for {', '.join(paths)}",
            )
        for n, (role, path) in enumerate(self.roles):
            model_free, folder = split_drafter(path)
            field = "models" if self.models else role.removeprefix("the ")
            if model_free is not None and (n > 0 or levels == 0):
                remedy = "list it before the models that verify its drafts."
                raise FieldError(field, path, remedy, f"{role} is {path}, which can only draft")
            if model_free is not None and folder and levels > 1:
                remedy = f"list {model_free.name} and {folder} as separate models."
                raise FieldError(field, path, remedy, f"{path} drafts for one verifier, not for {levels}")
        if self.lookup_texts is not None and split_drafter(paths[0])[0] is None:
            raise FieldError(
                "lookup_texts",
                self.lookup_texts,
                "leave it out, or draft with --drafter lookup or --drafter lookup+FOLDER.",
                f"{self.roles[0][0]} is {paths[0]}, which searches no texts",
            )
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
            if math.isnan(alpha):  # with a single model, no method's range excludes it
                raise FieldError("alpha", alpha, "give a number.")
            if block_size > max(self.max_new_tokens, 100):  # drafts past a text's end are wasted
                field = "max_block_size" if self.adaptive else "block_size"
                raise FieldError(
                    field,
                    block_size,
                    f"lower it: an output has at most max_new_tokens = {self.max_new_tokens} tokens.",
                )
        if self.vocabulary not in VOCABULARIES:
            raise FieldError("vocabulary", self.vocabulary, f"known: {', '.join(VOCABULARIES)}.")
        if self.dtype != "auto":  # does not look for devices
            dtype_of(self)


def _described(made: Any) -> str:
    """The name of a sampler's or rule's function, with the values that are bound to it."""
    function = made.target if isinstance(made, Method) else made
    if isinstance(function, functools.partial):
        return f"{_described(function.func)} {function.keywords}"
    return getattr(function, "__qualname__", type(function).__qualname__)


def dtype_of(config: DecodeConfig) -> str:
    """The dtype of a config's weights on this machine. Raises FieldError for an unknown one."""
    dtype, problem = config.dtype, ""
    if dtype == "auto":
        dtype = automatic_dtype()
        problem = f"dtype is auto, and SPECCASCADE_DTYPE is {dtype!r}"
    if dtype not in DTYPES:
        raise FieldError("dtype", dtype, f"known: auto, {', '.join(DTYPES)}.", problem)
    return dtype


def available() -> dict[str, Path]:
    """The files, by name, of the configs in the package and in ./configs."""
    return {
        path.stem: path
        for folder in (CONFIGS, Path("configs"))
        for path in sorted(folder.glob("*.py"))
        if not path.stem.startswith("_") and path.is_file()
    }


def in_the_repository_only(path: str | Path) -> bool:
    """Whether `path`, which is missing here, exists in a clone of the repository."""
    return Path(path).is_relative_to(DEMO) and CONFIGS.parent == PACKAGE


class ConfigError(ValueError):
    """A config file that cannot be used; the message names it."""


def path_of(name: str | Path) -> Path:
    """The file of a config, given its name or path. Raises ConfigError with the closest known name."""
    path = Path(name) if str(name).endswith(".py") else available().get(str(name))
    if path is None or not os.path.isfile(path):
        known = available()
        near = difflib.get_close_matches(str(name)[:100], known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"no config {str(name)!r}{hint} Known: {', '.join(known) or 'none'}.")
    return path


def load(name: str | Path, kind: Any = None) -> Any:
    """The `config` of a file in configs/, or of the file at path `name`.

    Raises ConfigError if it is not a valid config, or not a `kind`.
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
    """Runs a config file and returns its variables. Its output goes to stderr."""
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes, which is too large for a config.")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return runpy.run_path(str(path))
    except ConfigError:  # raised by a config that this one loads
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f" while {path} ran") from None
    except BaseException as error:  # including sys.exit(): a config may run any code
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        said = str(error) if isinstance(error, FieldError) else traceback.format_exception_only(error)[-1]
        said = " ".join(said[:300].split())
        raise ConfigError(f"{path}{f', line {lines[-1]}' if lines else ''}: {said.rstrip('.')}.") from None


def _wrong_fields(config: Any) -> Iterator[str]:
    """Describes each field of a dataclass, including nested ones, whose value has the wrong type or cannot be
    used."""
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
    """Describes an unusable text or number; empty if it can be used."""
    values = value if isinstance(value, tuple) else (value,)
    for text in values:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            return f"is {text[:50]!a}, which is not valid Unicode"
        if isinstance(text, int) and text.bit_length() > LARGEST_BITS:
            return f"is an integer of {text.bit_length()} bits, which is too large"
    return ""


def check_usable(config: Any) -> None:
    """Raises FieldError for an unusable text or number in a field."""
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
    if kind in (int, float):  # bool is a subclass of int
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _other_kind(name: str, config: Any) -> str:
    """Describes a config of the wrong kind, and suggests another one."""
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
