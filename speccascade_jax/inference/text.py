"""Cascade: the API that decodes texts."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from speccascade_jax import checkpoints
from speccascade_jax.config import (
    ONLY_IN_THE_REPOSITORY,
    PREFIX_CACHE,
    DecodeConfig,
    dtype_of,
    in_the_repository_only,
)
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.nests import each as of_nest
from speccascade_jax.core.nests import network_of
from speccascade_jax.core.protocols import LanguageModel, Sampler, ability_of
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.adaptive import Adaptive
from speccascade_jax.core.samplers.drafts import Drafters, kind_of
from speccascade_jax.core.samplers.lookup import ModelFree, split_drafter
from speccascade_jax.core.samplers.named import VERIFIER
from speccascade_jax.core.samplers.stored import LONGEST, MOST_TOKENS, Stored, index_of
from speccascade_jax.core.transforms import TRUNCATIONS, static_bound
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.inference.inputs import read_texts
from speccascade_jax.inference.vocabulary_checks import check_drafts, check_method
from speccascade_jax.learned.rules import load as load_rule
from speccascade_jax.models import full_of, start_of
from speccascade_jax.models.members import check_order
from speccascade_jax.parallel import AXIS, TENSOR_AXIS, tensor_mesh, tensor_sharding, whole_on
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.scheduling.programs import Clock, Plan, Programs, crowded
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import LOOK_EVERY, Lane, LogitsError, Result, Scheduler
from speccascade_jax.settings import NAMED, Settings, named, resolved
from speccascade_jax.tokenizers.markers import Tokenized, tokenized
from speccascade_jax.tokenizers.tokenizer import Tokenizer, as_user, text_of
from speccascade_jax.vocabularies import Strategy, strategy_of
from speccascade_jax.vocabularies.joining import joined, readings
from speccascade_jax.vocabularies.translated import Translated

SMALL_BATCH = 64  # batches up to this never shrink, so that precompiled programs fit
SHORT = 256  # tokens of padding that do not justify another program
REWRITTEN = 2**31  # offset of the input index for the random numbers of a sequence cascade's second text


@dataclasses.dataclass(frozen=True)
class Output:
    """One decoded input."""

    index: int
    source: str
    text: str
    tokens: list[int]  # including the end-of-sequence token or stop sequence at the end
    origin: list[str]  # of each token: draft, correction, bonus, or model (autoregressive)
    counts: dict[str, Any]  # core.counters.Counters and the drafter's passes; empty for an empty input
    truncated: bool = False  # the input was truncated to max_source_length
    level: list[int] = dataclasses.field(
        default_factory=list
    )  # the model that wrote each token; 0: the smallest


@dataclasses.dataclass
class Cascade:
    """Models that decode together, smallest first: a drafter and a verifier, a single model, or a hierarchy.

    Members of one network are adjacent and have the same parameters. With `model_free`, the smallest one is
    not a model and has no parameters, or `beside` drafts together with it.
    """

    models: tuple[LanguageModel, ...]
    params: tuple[Any, ...]  # of each model
    tokenizer: Tokenizer
    prefix: str = ""
    max_source_length: int = 80  # tokens, including the special one at the beginning or end
    max_new_tokens: int = 80
    # The devices that share the rows, each with all parameters (parallel.make_mesh), or in groups that share
    mesh: Mesh | None = None  # the parameters, too (parallel.decoding_mesh)
    suffix: str = ""
    stop: tuple[str, ...] = ()  # each ends an output, as the end-of-sequence token does, and is removed
    chat: bool = False  # each text is a user's message, formatted with the models' own chat templates
    # The tokenizers of drafters with another vocabulary
    foreign: dict[Translated, Tokenizer] = dataclasses.field(default_factory=dict)
    vocabulary: str | Strategy = "auto"  # how these draft: a name of VOCABULARIES, or a Strategy
    model_free: ModelFree | None = None  # the drafter without a checkpoint
    beside: Any = None  # the model that drafts together with it
    lookup_texts: Sequence[str] = ()  # searched by lookup, besides each text's own source and output
    trained: Method | None = None  # a trained method, used for its name; see learned.rules
    # Further methods by name: samplers, or functions from the models, smallest first, to a sampler.
    samplers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefix_cache_bytes: int = PREFIX_CACHE  # per device, for shared prompt prefixes; 0: no cache

    def __post_init__(self) -> None:
        Settings(stop=self.stop, max_new_tokens=self.max_new_tokens).check(self.verifier.vocab_size)
        check_order(self.models, self.params)
        # A sampler's parameters are found by its models, so models of one shape must be distinct objects.
        self.models = tuple(
            copy.copy(model) if any(model is other for other in self.models[:n]) else model
            for n, model in enumerate(self.models)
        )
        if self.beside is not None and getattr(self.drafter, "drafts_at_once", None) is not None:
            raise FieldError(
                "models",
                self.beside,
                "name one of the two.",
                "lookup drafts beside a model that writes one token after another, not several at once",
            )
        self.named = {**({self.trained.name: self.trained} if self.trained else {}), **named(self.samplers)}
        if self.chat:
            self.tokenizer.template()
        placed = {id(weights): self._placed(weights) for weights in self.params}
        self.params = tuple(placed[id(weights)] for weights in self.params)
        self.made = dict[Any, Any]()  # parameters of samplers' models that are not the cascade's
        if self.lookup_texts:
            self.made[self.beside or self.drafter] = self._placed(self._stored())
        self.clock, self.programs = Clock(), dict[Any, Programs]()
        self.prefixes = PrefixCache(self.prefix_cache_bytes) if self.prefix_cache_bytes else None
        self.latest: list[Request] = []  # the last request of a file; the next one may share its prefix
        self.strategy = strategy_of(self.vocabulary)
        self.host_drafter: Any = None
        if self.strategy.drafts is not None and self.foreign:
            if self.model_free is not None:
                raise FieldError(
                    "vocabulary",
                    self.strategy.name,
                    "use vocabulary tli.",
                    f"{self.strategy.name} drafts on the host, {self.model_free.name} does not",
                )
            self.host_drafter = self.strategy.drafts(
                *next(iter(self.foreign.items())),
                self.params[0],
                self.tokenizer,
                self.max_source_length,
                self.max_new_tokens,
            )

    @classmethod
    def load(
        cls,
        *paths: str | Path,
        dtype: Any = jnp.float32,
        tokenizer: str | Path | None = None,
        tensor_parallel: int = 1,
        vocabulary: str | Strategy = "auto",
        **fields: Any,
    ) -> "Cascade":
        """Loads checkpoints, smallest model first, with a `tokenizer` file that replaces their own if given.
        FOLDER@NAME is a member of the network in FOLDER, for example an early exit; shared parameters are
        read once. The first of several models may be a name of MODEL_FREE, such as lookup, or NAME+FOLDER.
        Parameters are split over `tensor_parallel` devices as they are read. If vocabularies differ,
        `vocabulary` selects how they are joined.

        Raises ValueError if the models are incompatible.
        """
        model_free, folder = split_drafter(str(paths[0])) if paths else (None, "")
        paths = paths if model_free is None else (folder, *paths[1:])[not folder :]
        if not paths:
            raise FieldError(
                "models", (), "give a checkpoint, or several, the smallest model's first.", "no models"
            )

        mesh = fields.get("mesh")
        if mesh is None or TENSOR_AXIS not in mesh.axis_names:
            mesh = None if tensor_parallel == 1 else tensor_mesh(tensor_parallel)

        def cut(path: str) -> Any:
            return None if mesh is None else partial(tensor_sharding, mesh, checkpoints.config_of(path))

        *others, largest = loaded = checkpoints.load_all(paths, dtype, cut, decoding=True)
        target = Tokenizer(tokenizer or largest.tokenizer_file())
        read = [target if tokenizer else Tokenizer(other.tokenizer_file()) for other in others] + [target]
        for checkpoint, model_tokenizer in zip(loaded, read, strict=True):
            if model_tokenizer.size > checkpoint.model.vocab_size:
                raise ValueError(
                    f"the tokenizer {tokenizer or checkpoint.tokenizer} has {model_tokenizer.size} pieces, "
                    f"the models only {checkpoint.model.vocab_size}: it belongs to other models."
                )
        joint = joined(
            [
                (checkpoint.model, checkpoint.params, model_tokenizer)
                for checkpoint, model_tokenizer in zip(loaded, read, strict=True)
            ],
            strategy_of(vocabulary),
        )
        fields["stop"] = (*fields.get("stop", ()), *target.ends(full_of(largest.model.config)))
        models, params = joint.models, joint.params
        beside = None
        if model_free is not None:
            drafter = model_free.model(models[-1].vocab_size, start_of(largest.model.config))
            if folder:
                beside = drafter
            else:
                models, params = [drafter, *models], [(), *params]
        return cls(
            tuple(models),
            tuple(params),
            target,
            foreign=joint.foreign,
            vocabulary=vocabulary,
            model_free=model_free,
            beside=beside,
            **fields,
        )

    @classmethod
    def from_pretrained(
        cls, verifier: str | Path, drafter: str | Path | None = None, **options: Any
    ) -> "Cascade":
        """Loads a verifier and its drafter, or a verifier alone, from folders or names on the Hugging Face
        hub such as google/flan-t5-large. `options` are those of load()."""
        paths = (verifier,) if drafter is None else (drafter, verifier)
        return cls.load(*map(checkpoints.at_hub, paths), **options)

    @classmethod
    def from_config(cls, config: DecodeConfig, mesh: Mesh | None = None) -> "Cascade":
        """Loads the models of a DecodeConfig. Raises a ValueError that says what to do if they cannot be
        loaded."""
        check_folders(config)
        config.check()
        names = (
            "tokenizer",
            "prefix",
            "suffix",
            "max_source_length",
            "max_new_tokens",
            "tensor_parallel",
            "stop",
            "chat",
            "vocabulary",
            "samplers",
            "prefix_cache_bytes",
        )
        same: dict[str, Any] = {"mesh": mesh, **{name: getattr(config, name) for name in names}}
        same["trained"] = load_rule(config.router) if config.router else None
        if (file := config.lookup_texts) is not None:
            texts = [text for text in read_texts(file, fields=("text", "target")) if text.strip()]
            if not texts:
                raise FieldError("lookup_texts", file, "give a file with texts.", f"{file} holds no texts")
            same["lookup_texts"] = texts
        return cls.load(*(path for _, path in config.roles), dtype=jnp.dtype(dtype_of(config)), **same)

    @property
    def drafter(self) -> LanguageModel:
        return self.models[0]

    @property
    def verifier(self) -> LanguageModel:
        return self.models[-1]

    @property
    def looks_up_alone(self) -> bool:
        """Whether drafts are only looked up, without a model that drafts."""
        return self.model_free is not None and self.beside is None

    def _stored(self) -> Stored:
        """The index of lookup_texts. Raises FieldError if no drafter searches them, or if they are too
        long."""
        lookup: Any = self.beside or self.drafter
        if self.model_free is None:
            remedy = "draft with lookup."
            raise FieldError("lookup_texts", self.lookup_texts, remedy, "no drafter searches texts")
        before = [lookup.start_id]
        if lookup.start_id is None:  # an output follows its prompt, and every prompt has the same end, if any
            [prompt] = self.tokenizer.encode_batch(self.prompts([""], self.tokenizer))
            before = prompt[-LONGEST:] if self.suffix or self.chat else []
        encoded = self.tokenizer.encode_batch([*self.lookup_texts])
        rows = [[*before, *row, self.tokenizer.eos_id] for row in encoded]
        if (count := sum(map(len, rows))) > MOST_TOKENS:
            problem = f"the texts to look up in have {count:,} tokens"
            raise FieldError("lookup_texts", count, f"give at most {MOST_TOKENS:,}.", problem)
        return index_of(rows)

    @property
    def levels(self) -> int:
        """The number of models that verify."""
        return len(self.models) - 1

    @property
    def devices(self) -> int:
        """The number of devices that share a batch's rows."""
        return 1 if self.mesh is None else self.mesh.shape[AXIS]

    def sampler(
        self,
        settings: Settings,
        methods: tuple[tuple[Method, ...], ...] | None = None,
        verifications: Sequence[str] = (),
    ) -> tuple[Sampler, Any]:
        """The sampler of these settings, and its parameters. methods: the methods that rows choose from at
        each level, if there are several. verifications: likewise, the same at every level."""
        scheme = settings.scheme(self.levels)
        if scheme:
            sampler = scheme.sampler(self.models)
        else:
            sampler = self._cascaded(settings, methods, verifications or (settings.verification,))
        return sampler, of_nest(self._params_of, sampler.models)

    def _cascaded(
        self,
        settings: Settings,
        methods: tuple[tuple[Method, ...], ...] | None,
        verifications: Sequence[str],
    ) -> Sampler:
        """A sampler in which each model, except the smallest, verifies the drafts of those below it."""
        levels = methods or tuple((rule,) for rule in settings.rules(self.levels))
        sizes = settings.block_sizes(self.levels)
        ways = tuple(VERIFICATIONS[name] for name in verifications)
        verification = ways if len(ways) > 1 else ways[0]
        if self.host_drafter is not None:
            return self.host_drafter.sampler(self.verifier, levels[0], sizes[0], verification)
        drafters = Drafters(self.drafter, sizes[0], self.model_free is not None, self.beside)
        drafts = kind_of(drafters)
        kind: Any = Speculative if settings.stops is None else partial(Adaptive, stop_below=settings.stops)
        kinds = [drafts.verified_by or kind, *[kind] * (self.levels - 1)]
        sampler: Any = drafts.sampler(drafters)
        for kind, model, several, size in zip(kinds, self.models[1:], levels, sizes, strict=True):
            method = several if len(several) > 1 else several[0]
            sampler = kind(sampler, model, method, size, settings.hand_over, verification)
        return sampler

    def _params_of(self, model: Any) -> Any:
        """The parameters of a model, or of its network. A model that is not part of the cascade makes its
        parameters with `params_from`. Raises FieldError if it has no such method."""
        if hasattr(model, "params_from"):
            if model not in self.made:
                self.made[model] = self._placed(model.params_from(self._params_of))
            return self.made[model]
        networks = [network_of(known) for known in self.models]
        for same in (lambda known: known is model, lambda known: known == model):
            for known, params in zip(networks, self.params, strict=True):
                if same(known):
                    return params
        raise FieldError(
            "sampler",
            model,
            "build it from cascade.models, or give the model a params_from.",
            "the sampler has a model that is not one of the cascade's",
        )

    def _placed(self, params: Any) -> Any:
        """The parameters on every device of the mesh."""
        return whole_on(self.mesh, params)

    def encode(
        self, texts: Sequence[str], truncate: bool = False, first_index: int = 0
    ) -> tuple[list[list[int]], list[bool]]:
        """The token ids of texts ([] for blank ones), and which texts were truncated. Errors count inputs
        from `first_index`.

        Raises FieldError for a text longer than max_source_length unless `truncate`.
        """
        for n, text in enumerate(texts, first_index):
            if not isinstance(text, str):
                raise ValueError(f"input {n} is {text!r}, not a text.")
        rows = self.tokenizer.encode_batch(self.prompts(texts, self.tokenizer))
        limit, cut = self.max_source_length, []
        for n, (row, text) in enumerate(zip(rows, texts, strict=True)):
            whole = len(self.tokenizer.framed(row))
            cut.append(bool(text.strip()) and whole > limit)
            if cut[-1] and not truncate:
                raise FieldError(
                    "max_source_length",
                    limit,
                    "shorten it, raise --max-source-length, or cut it with --truncate.",
                    f"input {first_index + n} has {whole} tokens, the limit is {limit}",
                )
            rows[n] = self.tokenizer.framed(row, limit) if text.strip() else []
        return rows, cut

    def foreign_readings(self, texts: Sequence[str]) -> list[dict[Translated, list[int]]]:
        """Each text in the tokens of every model with another vocabulary."""
        return readings(self.foreign, texts, self.max_source_length, self.prompts)

    def prompts(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
        """The tokens that a model with this tokenizer reads for each text."""
        texts = [self.prefix + text + self.suffix for text in texts]
        return as_user(texts, tokenizer, self.tokenizer) if self.chat else texts

    def generate(
        self,
        texts: Iterable[str],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        batch_size: int = 1,
        truncate: bool = False,
        first_index: int = 0,
        beginnings: Sequence[str] = (),
        **changes: Any,
    ) -> Iterator[Output]:
        """Decodes `texts` and yields their outputs in order, as soon as they are known.

        settings: one for all texts, or one per text. `changes` replace fields of the settings:
        generate(texts, method="token_v3", alpha=0.3). In float32 an output depends on its text, its settings
        and its index (counted from `first_index`), but not on its batch. Blank texts have empty outputs. Each
        device decodes up to `batch_size` rows. Shared prefixes of texts are read once; `beginnings` gives
        such prefixes in advance. Raises ValueError for invalid settings before anything is decoded.
        """
        if isinstance(texts, str):
            raise FieldError(
                "texts", texts, "give a list of texts: [text].", f"texts is one text, {texts[:40]!r}"
            )
        for name, value, least in (("batch_size", batch_size, 1), ("first_index", first_index, 0)):
            if value < least:
                raise FieldError(name, value, f"it must be at least {least}.")
        shared = settings is None or isinstance(settings, Settings)
        unchecked: Any = [settings or Settings()] if shared else settings
        each = [self.checked(point, changes) for point in unchecked]
        if not shared:
            texts = list(texts)
            if len(texts) != len(each):
                raise FieldError(
                    "settings",
                    len(each),
                    "give one for all, or one for each text.",
                    f"there are {len(texts)} texts and {len(each)} settings",
                )
        return self._generate(iter(texts), each, shared, batch_size, truncate, first_index, beginnings)

    def checked(self, settings: Settings, changes: dict[str, Any]) -> Settings:
        """The settings with `changes`, and with this cascade's limits for those that they do not set."""
        if "sampler" in changes:  # raises: it is not a setting
            changes = {name: value for name, value in changes.items() if name != "sampler"} | {
                "method": changes["sampler"]
            }
        unknown = changes.keys() - {field.name for field in dataclasses.fields(Settings)}
        if unknown:
            raise TypeError(f"generate() has no argument {min(unknown)!r}.")
        settings = resolved(dataclasses.replace(settings, **changes), self.named)
        settings.check(self.verifier.vocab_size, self.levels, {**NAMED, **self.named})
        if self.foreign:
            check_method(settings, self.levels, self.strategy)
        scheme = settings.scheme(self.levels)
        if scheme is not None and scheme.verifications is None:
            settings.check_sampler(scheme, scheme.sampler(self.models))
        self.check_model_free(settings)
        self.check_at_once(settings)
        if settings.max_new_tokens is not None and settings.max_new_tokens > self.max_new_tokens:
            raise FieldError(
                "max_new_tokens",
                settings.max_new_tokens,
                "load it with a larger limit.",
                f"max_new_tokens is {settings.max_new_tokens}, and this cascade was made for at "
                f"most {self.max_new_tokens}",
            )
        self.spans(settings)
        return dataclasses.replace(settings, stop=tuple(dict.fromkeys((*self.stop, *settings.stop))))

    def check_at_once(self, settings: Settings) -> None:
        """Raises FieldError for settings that are incompatible with a drafter that writes a draft in one
        call."""
        limit = getattr(self.drafter, "drafts_at_once", None)
        if limit is None:
            return
        scheme = settings.scheme(self.levels)
        if scheme is None:
            size = settings.block_sizes(self.levels)[0]
            if size > limit:
                field = "max_block_size" if settings.adaptive else "block_size"
                problem = f"{field} is {size}, and the drafter writes {limit} tokens at once"
                raise FieldError(field, size, f"it must be at most {limit}.", problem)
        elif scheme.models is not None or scheme.sampler(self.models) == Autoregressive(self.drafter):
            problem = (
                f"{settings.name} asks the drafter for one token after another, and it writes several at once"
            )
            raise FieldError("method", settings.name, "choose a rule from --list, or verifier.", problem)

    def check_model_free(self, settings: Settings) -> None:
        """Raises FieldError for settings that are incompatible with drafts without a model."""
        if self.model_free is None:
            return
        check_drafts(settings, self.levels, self.model_free)
        scheme = settings.scheme(self.levels)
        if scheme and self.looks_up_alone and scheme.sampler(self.models).models == self.drafter:
            problem = f"{self.model_free.name} writes no text by itself"
            raise FieldError("method", settings.name, "choose another method.", problem)

    def spans(self, settings: Settings) -> Tokenized:
        """The settings' alpha_after in tokens. Raises FieldError for a marker that the vocabulary lacks."""
        return tokenized(self.tokenizer, settings.leniences_after(self.levels))

    def _generate(
        self,
        texts: Iterator[str],
        each: list[Settings],
        shared: bool,
        batch_size: int,
        truncate: bool,
        first_index: int,
        beginnings: Sequence[str],
    ) -> Iterator[Output]:
        lanes, known = self.lanes(each), self._beginnings(beginnings)
        # Rows are sorted by length within a window, so that a batch pads little.
        rows = batch_size * self.devices
        capacity = 1 if rows == 1 else 8 * rows
        begun, window = first_index, list(islice(texts, capacity))
        if len(window) < rows and batch_size > SMALL_BATCH:
            needed = -(-len(window) // self.devices)
            batch_size = min(batch_size, max(SMALL_BATCH, 1 << max(needed - 1, 0).bit_length()))
        while window:
            window_settings = each * len(window) if shared else each[begun - first_index :][: len(window)]
            yield from self._window(lanes, window, window_settings, begun, batch_size, truncate, known)
            begun += len(window)
            window = list(islice(texts, capacity))

    def _beginnings(self, texts: Sequence[str]) -> list[Request]:
        """Requests that contain only shared beginnings of texts."""
        texts = [text for text in texts if text.strip()]
        rows, _ = self.encode(texts, truncate=True)
        return [
            Request(row, Settings(), foreign=reading)
            for row, reading in zip(rows, self.foreign_readings(texts), strict=True)
        ]

    def _window(
        self,
        lanes: dict[Any, Lane],
        texts: list[str],
        each: list[Settings],
        begun: int,
        batch_size: int,
        truncate: bool,
        beginnings: list[Request],
    ) -> Iterator[Output]:
        """Yields the texts' outputs. Raises ValueError at the first text that cannot be decoded."""
        rows, cut = self.encode(texts, truncate, begun)
        outputs: list[Output | LogitsError] = [
            Output(begun + n, text, "", [], [], {}, cut[n]) for n, text in enumerate(texts)
        ]
        by_lane: dict[Any, list[int]] = {}
        for n, (row, settings) in enumerate(zip(rows, each, strict=True)):
            if row:
                by_lane.setdefault(self.lane_of(settings), []).append(n)
        for key, chosen in by_lane.items():
            decode = partial(self._decode, batch_size=batch_size, beginnings=beginnings)
            read = self.foreign_readings([texts[n] for n in chosen])
            requests = [
                Request(
                    rows[n],
                    each[n],
                    begun + n,
                    lanes[key].numbers(each[n]),
                    each[n].stop,
                    reading,
                    self.spans(each[n]),
                )
                for n, reading in zip(chosen, read, strict=True)
            ]
            results = (
                self._rewritten(lanes, requests, decode)
                if self._confidence(each[chosen[0]])
                else decode(lanes[key], requests)
            )
            for n, result in zip(chosen, results, strict=True):
                if isinstance(result, LogitsError):
                    outputs[n] = result
                    continue
                text = text_of(self.tokenizer, result.tokens, each[n].stop)
                outputs[n] = Output(begun + n, texts[n], text, truncated=cut[n], **result._asdict())
        for number, output in enumerate(outputs, begun):
            if isinstance(output, LogitsError):
                raise ValueError(f"input {number}: {output}") from None
            yield output

    def _decode(
        self, lane: Lane, requests: list[Request], batch_size: int, beginnings: list[Request]
    ) -> list[Result | LogitsError]:
        """The requests' results, in their order."""
        scheduler = self.scheduler(lane.plan, lane.params, batch_size)
        ids, results = scheduler.admit(requests), dict[int, Result | LogitsError]()
        scheduler.prompts.expect([*zip(ids, requests, strict=True)], [*beginnings, *self.latest])
        self.latest = requests[-1:]
        while scheduler.busy:
            scheduler.run()
            results |= dict(scheduler.finished())
        return [results[number] for number in ids]

    def _confidence(self, settings: Settings) -> Callable[[np.ndarray], float] | None:
        """The function that computes the drafter's confidence in its text; None if the verifier never
        rewrites texts."""
        scheme = settings.scheme(self.levels)
        return scheme.confidence if scheme else None

    def _rewritten(
        self,
        lanes: dict[Any, Lane],
        requests: list[Request],
        decode: Callable[[Lane, list[Request]], list[Result | LogitsError]],
    ) -> list[Result | LogitsError]:
        """Decodes with a sequence cascade: the drafter's texts, and the verifier's if the drafter's
        confidence is low."""
        drafts = decode(lanes[self.lane_of(requests[0].settings)], requests)
        deferred = []
        for n, (draft, request) in enumerate(zip(drafts, requests, strict=True)):
            if isinstance(draft, LogitsError):
                continue
            log_q, settings = np.array(draft.counts["log_q"]), request.settings
            confidence = self._confidence(settings)
            if confidence and log_q.size and confidence(log_q) < 1 - settings.of_levels("alpha", 1)[0]:
                deferred.append(n)
        again = [requests[n]._replace(number=requests[n].number + REWRITTEN) for n in deferred]
        rewritten = dict(zip(deferred, decode(lanes[VERIFIER], again), strict=True))
        results: list[Result | LogitsError] = []
        for n, draft in enumerate(drafts):
            kept = rewritten.get(n, draft)
            if isinstance(draft, LogitsError) or isinstance(kept, LogitsError):
                results.append(LogitsError())
                continue
            size = len(draft.tokens)
            counts = {
                "drafter_passes": size,
                "rounds": 0,
                "drafted": size,
                "accepted": size,
                "deferred": 0,
                "emitted": size,
            }
            if n in rewritten:
                length = len(kept.tokens)
                counts |= {"rounds": length, "accepted": 0, "deferred": size, "emitted": length}
            origin = ["correction" if n in rewritten else "draft"] * len(kept.tokens)
            level = [int(n in rewritten)] * len(kept.tokens)
            results.append(kept._replace(origin=origin, level=level, counts=counts))
        return results

    def stream(
        self, text: str, settings: Settings | None = None, *, index: int = 0, **changes: Any
    ) -> Iterator[str]:
        """Yields the text so far after every round; the last one is generate()'s output for the same
        index."""
        settings = self.checked(settings or Settings(), changes)
        if self._confidence(settings):  # its text is not final before the end
            yield from (output.text for output in self.generate([text], settings, first_index=index))
            return
        [row], _ = self.encode([text])
        if not row:
            return
        lane = self.lanes([settings])[self.lane_of(settings)]
        scheduler = self.scheduler(lane.plan, lane.params, 1)
        [number] = scheduler.admit(
            [
                Request(
                    row,
                    settings,
                    index,
                    lane.numbers(settings),
                    settings.stop,
                    self.foreign_readings([text])[0],
                    self.spans(settings),
                )
            ]
        )
        while scheduler.busy:
            scheduler.run(rounds=1)
            result = scheduler.partial(number) or dict(scheduler.finished())[number]
            if isinstance(result, LogitsError):
                raise result
            yield text_of(self.tokenizer, result.tokens, settings.stop)

    def precompile(self, settings: Settings | None = None, *, batch_size: int = 1, **changes: Any) -> None:
        """Compiles the programs of generate() with these arguments, for every source length. The values of
        alpha, seed, alpha_after and its markers, temperature, top_p and min_p do not matter."""
        settings = self.checked(settings or Settings(), changes)
        widths = sorted({self.bucket(n) for n in range(1, self.max_source_length + 1)})
        for lane in self.lanes([settings]).values():
            self.scheduler(lane.plan, lane.params, batch_size).precompile(widths)

    def scheduler(self, plan: Plan, params: Any, batch_size: int) -> Scheduler:
        """An empty scheduler with `batch_size` rows per device; its programs are kept for the next one."""
        programs = self._programs(plan, params)
        drafted = ability_of(plan.sampler, "proposed")
        proposer = self.host_drafter.proposer(programs, batch_size) if drafted else None
        return Scheduler(programs, batch_size, self.tokenizer, self.bucket, proposer, self.prefixes)

    def steady_scheduler(self, plan: Plan, params: Any, batch_size: int, width: int) -> Continuous:
        """The scheduler of a server, for requests of up to `width` tokens."""
        programs = self._programs(plan, params)
        return Continuous(programs, batch_size, self.tokenizer, self.bucket, width, self.prefixes)

    def _programs(self, plan: Plan, params: Any) -> Programs:
        # Models of one shape have equal plans, so the key includes the parameters.
        key = plan, *map(id, jax.tree.leaves(params))
        programs = self.programs.pop(key, None)
        if programs is None:
            while self.programs and crowded():
                del self.programs[next(iter(self.programs))]  # the least recently used
            programs = Programs(plan, params, self.mesh, self.clock, self.prefixes)
        self.programs[key] = programs
        return programs

    def lanes(self, each: Sequence[Settings]) -> dict[Any, Lane]:
        """The lanes that decode these settings; settings that can share a program share a lane."""
        groups: dict[Any, list[Settings]] = {}
        for settings in each:
            groups.setdefault(self.lane_of(settings), []).append(settings)
            if self._confidence(settings):
                groups.setdefault(VERIFIER, []).append(dataclasses.replace(settings, method=VERIFIER))
        lanes = {}
        for key, group in groups.items():
            methods: tuple[tuple[Method, ...], ...] = ()
            verifications = tuple(dict.fromkeys(settings.verification for settings in group))
            if type(key) is tuple:
                rules = [settings.rules(self.levels) for settings in group]
                methods = tuple(tuple(dict.fromkeys(level)) for level in zip(*rules, strict=True))
            sampler, params = self.sampler(group[0], methods, verifications)
            plan = Plan(
                sampler,
                self.max_new_tokens,
                self.tokenizer.eos_id,
                self.verifier.vocab_size,
                *truncations_of(group),
                history=LOOK_EVERY if any(s.stop for s in group) else 0,
                spans=any(s.alpha_after for s in group),
            )
            lanes[key] = Lane(plan, params, methods)
        return lanes

    def lane_of(self, settings: Settings) -> Any:
        """Equal for settings whose requests can share a program."""
        scheme = settings.scheme(self.levels)
        return scheme or (settings.block_sizes(self.levels), settings.stops, settings.hand_over)

    def bucket(self, length: int) -> int:
        """`length` rounded up, so that few source lengths are compiled: to eighths of max_source_length and,
        if an eighth is long, to halves of it, down to SHORT."""
        step = -(-self.max_source_length // 8 // 16) * 16 or 16
        while step > SHORT and length <= step // 2:
            step //= 2
        return min(-(-length // step) * step, max(self.max_source_length, 1))


def check_folders(config: DecodeConfig) -> None:
    """Raises a FieldError that says what to do if a checkpoint of a DecodeConfig is missing."""
    for role, path in config.folders:
        if not (checkpoints.is_remote(path) or Path(checkpoints.split_member(path)[0]).is_dir()):
            flag = "models" if config.models else role.removeprefix("the ")
            if in_the_repository_only(path):
                raise FieldError(flag, path, ONLY_IN_THE_REPOSITORY, f"{role}'s checkpoint {path} is missing")
            raise FieldError(
                flag,
                path,
                config.missing or f"give its folder with --{flag}.",
                f"{role}'s checkpoint {path} is missing",
            )


def truncations_of(settings: Sequence[Settings]) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """A Plan's `truncations` and `bounds` for rows with these settings."""
    values = {name: [getattr(each, name) for each in settings] for name in TRUNCATIONS}
    names = tuple(name for name, row in values.items() if any(value is not None for value in row))
    bounds = {name: static_bound(values[name]) for name in names if TRUNCATIONS[name].bounded}
    return names, tuple((name, bound) for name, bound in bounds.items() if bound)
