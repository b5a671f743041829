"""Decoding settings: each option is declared once.

A truncation is declared in core.transforms.TRUNCATIONS, a method with its knobs in core.rules.METHODS, a
scheme in baselines. Their fields here, and with them flags, help, requests and checks, derive from those
entries.
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

import tyro

from speccascade_jax.baselines import BASELINES
from speccascade_jax.core.errors import FieldError, check_range
from speccascade_jax.core.methods import Fixed, Knob, Method, Scheme
from speccascade_jax.core.protocols import Sampler
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import HandOver
from speccascade_jax.core.samplers.adaptive import STOP_BELOW
from speccascade_jax.core.samplers.named import SAMPLERS, VERIFIER
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.core.verification import TOKEN, VERIFICATIONS, is_default, verifications_of

MOST_TOKENS = 2**17  # most tokens of a text
MOST_MARKERS = 4  # most markers in alpha_after
NAMED: Mapping[str, Method | Scheme] = {**METHODS, **BASELINES, **SAMPLERS}
"""The methods by the names that --method takes. A config's `samplers`, which may be rules, add names."""
KNOBS: dict[str, Knob] = {name: knob for method in METHODS.values() for name, knob in method.knobs.items()}
"""The numbers that some methods read in addition to alpha, by name."""
Choice = str | Method | Scheme | Sampler
"""A method: its name, or an object instead of a name. A function is called with the models, smallest first,
and returns a sampler."""
NO_FILE = "give its file with --router; scripts/finetune.py trains it."
LOAD = "load"  # a server adapts the block size to the number of its rows
ADAPTIVE = "adaptive"  # each text's draft ends when another token is not worth its time


def option(default: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Any:
    """A field whose values lie in [low, high], or in (low, high] with `above`. None and other values that are
    not numbers are not compared."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


def _choices(table: Mapping[str, Any]) -> Any:
    """The help of a flag that takes a name of `table`, whose entries have a `summary`."""
    return tyro.conf.arg(
        help="How drafts are verified, at every level. "
        + "; ".join(f"{name}: {entry.summary}" for name, entry in table.items())
        + "."
    )


def _markers_of(words: list[str]) -> dict[str, Any]:
    """The value of --alpha-after MARKER ALPHA MARKER ALPHA ...; a + joins the leniences of several verifiers.
    A word that is not a number remains a text, which Settings.check() refuses."""

    def lenience(word: str) -> float | tuple[float, ...] | str:
        try:
            numbers = tuple(map(float, word.split("+")))
        except ValueError:
            return word
        return numbers if len(numbers) > 1 else numbers[0]

    return dict(zip(words[::2], [*map(lenience, words[1::2]), ""], strict=False))


def _words_of(markers: Mapping[str, Any]) -> list[str]:
    return [word for marker, value in markers.items() for word in (marker, "+".join(map(str, _each(value))))]


Markers = Annotated[
    Mapping[str, float | tuple[float, ...]],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[MARKER ALPHA [MARKER ALPHA ...]]",
        instance_from_str=_markers_of,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=_words_of,
    ),
]


def _declared() -> Any:
    """The base of Settings: a field for each truncation and each knob."""

    def field(name: str, entry: Any, kind: Any, default: Any) -> tuple[str, Any, Any]:
        about = {
            "help": entry.summary,
            "low": entry.low,
            "high": entry.high,
            "above": entry.above,
            "dialect": getattr(entry, "dialect", None),
        }
        kind = Annotated[kind, tyro.conf.arg(help=entry.summary)]
        return name, kind, dataclasses.field(default=default, metadata=about)

    fields = [
        *(field(name, entry, entry.kind | None, None) for name, entry in TRUNCATIONS.items()),
        *(field(name, knob, knob.kind, knob.default) for name, knob in KNOBS.items()),
    ]
    return dataclasses.make_dataclass("Declared", fields, frozen=True, kw_only=True)


Declared: Any = _declared()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Declared):
    """How one text is decoded. Configs extend it, its fields are flags, and `Cascade.generate` takes it.

    With more than two models, method, alpha and block_size are one value for all verifiers, or a tuple with
    one value per verifier, smallest first; "speculative+opt" is a tuple of methods, too. The truncations,
    such as top_k and top_p (core.transforms.TRUNCATIONS), and the additional numbers of single methods
    (KNOBS) are fields as well.
    """

    # A method from --list, or `verifier` or `drafter` to run one model alone.
    method: Choice | tuple[Choice, ...] = "speculative"
    # The lenience. A larger value defers to the verifier less often, which is cheaper. With three or more
    # models, give one value, or one per verifier.
    alpha: float | tuple[float, ...] = 0.0
    # The lenience once a marker has been written, for example "The answer is" 0.0. If a text contains several
    # markers, the last one counts.
    alpha_after: Markers = dataclasses.field(default_factory=dict, hash=False)
    # Tokens to draft per verifier call. `adaptive` drafts up to --max-block-size tokens. `load`, for servers
    # only, drafts up to the config's block_size, and fewer tokens if that is faster for the current number of
    # rows. With three or more models, give one number, or one per verifier.
    block_size: int | Literal["adaptive", "load"] | tuple[int, ...] = 5
    # The largest adaptive block, in tokens.
    max_block_size: int = option(12, 1)
    # Adaptive drafting stops when the estimated probability that the whole draft is accepted falls below this
    # value. 0 never stops early.
    stop_below: float = option(STOP_BELOW, 0, 1)
    # With three or more models, what a level does with surplus tokens: `need` drafts no more than requested,
    # `truncate` drops the surplus, `keep` passes it on.
    hand_over: HandOver = "need"
    verification: Annotated[str, _choices(VERIFICATIONS)] = TOKEN.name
    # The sampling temperature. 0 decodes greedily.
    temperature: float = option(0.0, 0)
    # The random seed. An output depends on the seed and on the input's index, not on the batch.
    seed: int = option(0, -(2**63), 2**63 - 1)
    # The most tokens of an output, including the end-of-sequence token. None uses the cascade's limit.
    max_new_tokens: int | None = option(None, 1, MOST_TOKENS)
    # Tokens or texts that end an output, in addition to the end-of-sequence token.
    stop: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The method's name, or the names of all levels joined by +; an object without a name is `custom`."""
        return self.method if isinstance(self.method, str) else "+".join(map(_name, _each(self.method)))

    @property
    def defers(self) -> bool:
        """Whether deferrals are counted: some method is a deferral rule, or is not a Method at all."""
        return any(not isinstance(entry, Method) or entry.defers for entry in self._entries)

    @property
    def lossless(self) -> bool:
        """Whether the outputs are guaranteed to follow the largest model's distribution."""
        return all(isinstance(entry, Method) and entry.lossless for entry in self._entries)

    @property
    def _entries(self) -> list[Method | Scheme | None]:
        """The entry of each level's method; None for an unknown name."""
        return [_entry(method, self._known) for method in _each(self.method)]

    @property
    def _known(self) -> Mapping[str, Any]:
        """The entries by the names of methods; configs add their own."""
        return NAMED

    def of_levels(self, field: str, levels: int) -> tuple[Any, ...]:
        """The value of method, alpha or block_size for each of `levels` verifiers, smallest first; empty for
        a single model.

        Raises ValueError if the number of values does not match.
        """
        values = _each(getattr(self, field)) if levels else ()
        if levels and len(values) not in (1, levels):
            raise FieldError(
                field,
                getattr(self, field),
                f"give one value, or {levels}.",
                f"{field} has {len(values)} values; {levels + 1} models have {levels} verifiers",
            )
        return values * levels if len(values) == 1 else values

    def leniences_after(self, levels: int) -> dict[str, tuple[float, ...]]:
        """The leniences of `levels` verifiers after each marker. Raises ValueError if the number of values
        does not match."""
        leniences = {}
        for marker, value in self.alpha_after.items():
            values = _each(value)
            if len(values) not in (1, levels):
                raise FieldError(
                    "alpha_after",
                    value,
                    f"give one value, or {levels}.",
                    f"alpha_after[{marker[:40]!r}] has {len(values)} values; {levels + 1} models have "
                    f"{levels} verifiers",
                )
            leniences[marker] = values * levels if len(values) == 1 else values
        return leniences

    def by(self, method: Any, known: Mapping[str, Any] = NAMED) -> Self:
        """The settings with another method, without alpha_after if that method reads no lenience, and with
        the usual verification if it does not verify drafts in this one."""
        entries = [_entry(each, known) for each in _each(method)]
        reads = any(entry is None or _reads_alpha(entry) for entry in entries)
        verifies = all(_verifies_by(self.verification, entry) for entry in entries)
        return dataclasses.replace(
            self,
            method=method,
            alpha_after=self.alpha_after if reads else {},
            verification=self.verification if verifies else TOKEN.name,
        )

    @property
    def adaptive(self) -> bool:
        return self.block_size == ADAPTIVE

    @property
    def stops(self) -> float | None:
        """stop_below if blocks are adaptive. Adaptive blocks that never stop early are fixed ones."""
        return self.stop_below if self.adaptive and self.stop_below > 0 else None

    def block_sizes(self, levels: int) -> tuple[int, ...]:
        """The largest number of tokens drafted for each of `levels` verifiers."""
        return (
            dataclasses.replace(self, block_size=self.max_block_size).of_levels("block_size", levels)
            if self.adaptive
            else self.of_levels("block_size", levels)
        )

    def scheme(self, levels: int) -> Scheme | None:
        """The scheme that decodes instead of a method per verifier; None if each of `levels` verifiers has a
        method. A single model is a verifier alone."""
        entries = self._entries
        if len(entries) == 1 and isinstance(entries[0], Scheme):
            return entries[0]
        return VERIFIER if levels == 0 else None

    def rules(self, levels: int) -> tuple[Method, ...]:
        """The Method of each of `levels` verifiers, with its knobs set. Raises TypeError for a scheme."""
        return tuple(self._tuned(entry_of(method)) for method in self.of_levels("method", levels))

    def _tuned(self, entry: Method | Scheme | None) -> Method:
        if not isinstance(entry, Method):
            raise TypeError(f"{self.name} is not a target distribution.")
        return entry.tuned(**{name: getattr(self, name) for name in entry.knobs if hasattr(self, name)})

    def check(
        self, vocab_size: float = math.inf, levels: int | None = None, known: Mapping[str, Any] = NAMED
    ) -> None:
        """Raises FieldError for a method that is not `known`, a value out of range, or a number of values
        that does not match `levels`. None checks whatever can be checked before models are loaded."""
        fields = ("method", "alpha", "block_size")
        depth = levels or max(len(_each(getattr(self, field))) for field in fields)
        for method, alpha, block_size in zip(
            *(self.of_levels(field, depth) for field in fields), strict=True
        ):
            self._check_level(method, alpha, block_size, depth if levels is None else levels, known)
        self._check_markers()
        longest = max([depth, *(len(_each(value)) for value in self.alpha_after.values())])
        self._check_spans(depth if levels is not None else longest, known)
        for name, truncation in TRUNCATIONS.items():
            truncation.check(name, getattr(self, name), vocab_size)
        for field in dataclasses.fields(Settings):
            if "low" in field.metadata and field.name not in TRUNCATIONS:
                about = field.metadata
                check_range(
                    field.name, getattr(self, field.name), about["low"], about["high"], about["above"]
                )
        if self.hand_over not in get_args(HandOver):
            raise FieldError("hand_over", self.hand_over, f"known: {', '.join(get_args(HandOver))}.")
        if self.verification not in VERIFICATIONS:
            raise FieldError("verification", self.verification, f"known: {', '.join(VERIFICATIONS)}.")
        if isinstance(self.stop, str):
            raise FieldError("stop", self.stop, f"give a tuple of texts, such as ({self.stop!r},).")
        if "" in self.stop:
            raise FieldError(
                "stop", self.stop, "leave it out.", "stop holds an empty text, which ends every output"
            )

    def _check_level(
        self, method: Any, alpha: float, block_size: Any, levels: int, known: Mapping[str, Any]
    ) -> None:
        entry = _entry(method, known)
        if isinstance(method, str) and entry is None:
            raise FieldError("method", method, f"known: {', '.join(known)}.", f"unknown method {method!r}")
        if entry is None:
            raise FieldError("method", method, "give a name, a speccascade_jax.Method or a sampler.")
        if isinstance(entry, Scheme):
            self._check_scheme(entry, _name(method), levels)
        elif levels == 0:
            if not entry.lossless:
                raise FieldError(
                    "method",
                    _name(method),
                    "give two models or more.",
                    f"{_name(method)} needs a drafter and a verifier",
                )
            self._check_verification(VERIFIER)
        if not entry.low <= alpha <= entry.high:
            raise FieldError(
                "alpha", alpha, f"for {_name(method)} it must be in [{entry.low:g}, {entry.high:g}]."
            )
        if block_size == LOAD:
            raise FieldError(
                "block_size", LOAD, "give a number.", "block_size is load, which only servers support"
            )
        if isinstance(block_size, str) and (block_size != ADAPTIVE or levels > 1):
            raise FieldError("block_size", block_size, f"give a number, or {ADAPTIVE!r} with two models.")
        if not isinstance(block_size, str) and block_size < 1:
            raise FieldError("block_size", block_size, "it must be at least 1.")

    def _check_markers(self) -> None:
        """Raises FieldError for an invalid marker, and for a lenience that is not a number."""
        spans = self.alpha_after
        if not isinstance(spans, Mapping) or not all(isinstance(marker, str) for marker in spans):
            raise FieldError("alpha_after", spans, 'give numbers by text, such as {"The answer is": 0.0}.')
        if len(spans) > MOST_MARKERS:
            raise FieldError(
                "alpha_after",
                spans,
                f"give at most {MOST_MARKERS}.",
                f"alpha_after has {len(spans)} markers",
            )
        for marker, value in spans.items():
            if not marker:
                raise FieldError("alpha_after", spans, "name one.", "alpha_after has an empty marker")
            if not all(_is_number(alpha) for alpha in _each(value)):
                where = f"alpha_after[{marker[:40]!r}] is {reprlib.repr(value)}"
                raise FieldError("alpha_after", value, "give a number.", where)

    def _check_spans(self, levels: int, known: Mapping[str, Any]) -> None:
        """Raises FieldError for a lenience after a marker that these methods cannot use."""
        methods = self.of_levels("method", levels)
        if self.alpha_after and not any(_reads_alpha(_entry(method, known)) for method in methods):
            raise FieldError(
                "alpha_after",
                self.alpha_after,
                "leave it out, or choose a rule from --list.",
                f"alpha_after needs a rule that reads alpha at each position; {self.name} does not",
            )
        for marker, values in self.leniences_after(levels).items():
            for method, alpha in zip(methods, values, strict=True):
                entry = _entry(method, known)
                if isinstance(entry, Method) and not entry.low <= alpha <= entry.high:
                    raise FieldError(
                        "alpha_after",
                        alpha,
                        f"for {_name(method)} it must be in [{entry.low:g}, {entry.high:g}].",
                        f"alpha_after[{marker[:40]!r}] is {alpha}",
                    )

    def _check_scheme(self, scheme: Scheme, name: str, levels: int) -> None:
        if len(_each(self.method)) > 1:
            raise FieldError(
                "method", name, "give it alone.", f"{name} cannot be combined with other methods"
            )
        if scheme.models is not None and levels + 1 != scheme.models:
            raise FieldError(
                "method",
                name,
                "choose a rule from --list.",
                f"{name} needs {scheme.models} models, not {levels + 1}",
            )
        if scheme.greedy and self.temperature != 0:
            raise FieldError(
                "temperature",
                self.temperature,
                f"{name} decodes greedily: set it to 0, or choose another method.",
            )
        self._check_verification(scheme)

    def check_sampler(self, scheme: Scheme, sampler: Sampler) -> None:
        """Raises FieldError for a verification that the sampler, made by the scheme, does not offer."""
        self._check_verification(dataclasses.replace(scheme, verifications=verifications_of(sampler)))

    def _check_verification(self, scheme: Scheme) -> None:
        """Raises FieldError for a verification that a scheme is known not to offer. The default verification
        selects the first one that it offers."""
        if not _verifies_by(self.verification, scheme):
            raise FieldError(
                "verification",
                self.verification,
                f"known: {', '.join(scheme.verifications)}." if scheme.verifications else "leave it out.",
                f"verification is {self.verification!r}, and {scheme.name or scheme.summary} does not verify "
                "drafts in that way",
            )


def _entry(method: Any, known: Mapping[str, Any]) -> Method | Scheme | None:
    """entry_of(), with the names of `known`."""
    return known.get(method) if isinstance(method, str) else entry_of(method)


def _reads_alpha(entry: Method | Scheme | None) -> bool:
    """Whether a method's target depends on the lenience at each position."""
    return isinstance(entry, Method) and not entry.lossless


def _verifies_by(way: str, entry: Method | Scheme | None) -> bool:
    """Whether a method can be told to verify drafts in this way, as far as its entry says; the usual way is
    one for all."""
    ways = entry.verifications if isinstance(entry, Scheme) else None
    return ways is None or way in ways or is_default(way)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def entry_of(method: Any) -> Method | Scheme | None:
    """The entry of a method's name, or of an object instead of a name; None for anything else."""
    if isinstance(method, str):
        return NAMED.get(method)
    if isinstance(method, Method | Scheme):
        return method
    if isinstance(method, Sampler):
        summary, ways = f"the sampler {type(method).__name__}", verifications_of(method)
        return Scheme(Fixed(method), summary, verifications=ways)
    return Scheme(method, "a sampler of a config's") if callable(method) else None


def named(objects: Mapping[str, Any]) -> dict[str, Method | Scheme]:
    """A config's `samplers` by name. Raises FieldError for an object that cannot decode, and for a name that
    is taken."""
    entries: dict[str, Method | Scheme] = {}
    for name, value in objects.items():
        entry = None if isinstance(value, str) else entry_of(value)
        if entry is None:
            raise FieldError(
                "samplers",
                value,
                "give a sampler, or a function from the models to one.",
                f"samplers[{name!r}] is {value!r}",
            )
        if name in NAMED:
            raise FieldError(
                "samplers",
                name,
                "choose another name.",
                f"samplers names {name!r}, which is the name of a method",
            )
        entries[name] = dataclasses.replace(entry, name=name)
    return entries


def names_of(method: Any, objects: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replaces each object in a method, or in a tuple with one method per level, by its name. Returns these
    names, and `objects` by name with the replaced ones added.

    An object without a name is called `custom`. Raises FieldError if a name already stands for another
    object.
    """
    known = dict(objects)

    def name_of(entry: Any) -> Any:
        if isinstance(entry, str) or entry_of(entry) is None:
            return entry
        name = _name(entry)
        if NAMED.get(name) == entry:
            return name
        if name in NAMED or known.setdefault(name, entry) is not entry:
            raise FieldError(
                "method",
                name,
                "give each object its own name, for example Method(..., name='mine').",
                f"method is an object called {name!r}, which is the name of another one",
            )
        return name

    names = tuple(map(name_of, method)) if type(method) is tuple else name_of(method)
    return names, known


def resolved(settings: Settings, objects: Mapping[str, Any]) -> Settings:
    """The settings with names replaced by their objects: a trained network, or a config's samplers.

    Raises FieldError for a trained method whose file is missing or belongs to another method.
    """
    methods = _each(settings.method)
    names = [method for method in methods if isinstance(method, str)]
    if missing := next((name for name in names if _is_trained(name) and name not in objects), None):
        trained = [name for name in objects if _is_trained(name)]
        raise FieldError(
            "method",
            missing,
            NO_FILE,
            f"method {missing} is a trained network"
            + (f", and --router is the file of {trained[0]}" if trained else ""),
        )
    if not any(name in objects for name in names):
        return settings
    replaced = tuple(objects.get(method, method) if isinstance(method, str) else method for method in methods)
    return dataclasses.replace(settings, method=replaced if len(replaced) > 1 else replaced[0])


def _is_trained(name: str) -> bool:
    entry = NAMED.get(name)
    return isinstance(entry, Method) and entry.trained


def _each(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(value.split("+"))
    return value if type(value) is tuple else (value,)


def _name(method: Any) -> str:
    if isinstance(method, str):
        return method
    return getattr(method, "name", "") or "custom"
