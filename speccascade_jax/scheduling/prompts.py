"""Reads the prompts of a scheduler's rows in chunks, except for what the prefix cache holds."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.core.nests import each
from speccascade_jax.scheduling.chunks import leaves_of
from speccascade_jax.scheduling.prefixes import Owner, PrefixCache, blocks_of, shared_lengths
from speccascade_jax.scheduling.programs import Programs
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.markers import Tokenized
from speccascade_jax.vocabularies.translated import Translated

CHUNK = 128  # tokens of a chunk, unless a server's flag sets them
WORTH = 1024  # repeated prefix tokens from which sharing them is worth compiling its programs


class Request(NamedTuple):
    """A text to decode. `methods` has, for each level, the index of its method among the sampler's."""

    tokens: Sequence[int]
    settings: Settings
    number: int = 0  # determines the random draws, together with the seed
    methods: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    foreign: dict[Translated, list[int]] = {}  # noqa: RUF012 - the text in each foreign model's tokens
    spans: Tokenized = ()  # alpha_after of its settings, tokenized
    keeps_size: bool = False  # its block size does not follow the load

    @property
    def size(self) -> int:
        """The width that its inputs need."""
        return max([len(self.tokens), *(model.needs(len(ids)) for model, ids in self.foreign.items())])


Entry = tuple[int, Request]
"""A request and its id in a scheduler."""


class Reading(NamedTuple):
    """Requests that have no row yet and whose prompts have been, or are being, read. `placed` maps their rows
    in the state `fresh`, which has `rows` rows per device."""

    placed: dict[int, Entry]
    fresh: Any
    rows: int
    width: int
    starts: tuple[int, ...] = ()  # where each reader's next chunk begins, if prompts are read in chunks

    def without(self, gone: Iterable[int]) -> list["Reading"]:
        """This reading without these requests, in a list; an empty list if none remain."""
        placed = {place: entry for place, entry in self.placed.items() if entry[0] not in gone}
        return [self._replace(placed=placed)] if placed else []


class Prompts:
    """Reads prompts with a scheduler's programs.

    A segment holds one chunk, and chunks begin at multiples of their size, whether the earlier ones were read
    or restored. So the same programs compute a prompt's keys and values in either case.
    """

    def __init__(self, programs: Programs, prefixes: PrefixCache | None):
        self.programs, self.prefixes = programs, prefixes
        self.size = programs.plan.chunk or CHUNK
        self.shared: dict[int, Request] = {}  # id -> the part of the prompt that others share
        self.read_ahead: set[Any] = set()
        self.owners: dict[int, list[Owner]] = {}  # by reader: the owners of its segments

    def stores(self, number: int) -> bool:
        """Whether segments of the `number`-th reader are kept for other rows."""
        return self.prefixes is not None and self.programs.readers[number].stores

    def restored(self, reading: Reading) -> Reading:
        """A reading that has just begun, with the cached segments restored, up to the shortest cached prefix
        among its prompts."""
        starts = []
        for number in range(len(self.programs.readers)):
            cached = {
                place: self._segments(reading, number, request)
                for place, (_, request) in reading.placed.items()
            }
            count = min(map(len, cached.values()))
            for n in range(count):
                together: dict[Any, tuple[list[Any], list[int]]] = {}
                for place, segments in cached.items():
                    alike = tuple(map(id, segments[n]))
                    together.setdefault(alike, (segments[n], []))[1].append(place)
                for segments, places in together.values():
                    reading = self._put(reading, number, segments, places, n * self.size)
            starts.append(count * self.size)
        return reading._replace(starts=tuple(starts))

    def cached_tokens(self, reading: Reading) -> int:
        """The number of tokens, in the verifier's vocabulary, that restored() found of each prompt."""
        pairs = zip(self.programs.readers, reading.starts, strict=True)
        return next((start for reader, start in pairs if reader.foreign is None), 0)

    def complete(self, reading: Reading) -> bool:
        return self._next(reading) is None

    def advanced(self, reading: Reading, keep: bool) -> Reading:
        """The reading after one reader has read its next chunk. With `keep`, the chunk is cached."""
        number, programs, size = self._next(reading), self.programs, self.size
        if number is None:
            return reading
        reader, start = programs.readers[number], reading.starts[number]
        # The last chunk has to fit, so it may read some tokens again.
        at = min(start, reader.width(reading.width) - size)
        tokens = np.zeros((reading.rows * programs.devices, size), np.int32)
        for place, (_, request) in reading.placed.items():
            part = reader.tokens(request)[at : at + size]
            tokens[place, : len(part)] = part
        read = programs.read(reading.rows, reading.width, number, size)
        fresh = programs.call(read, programs.weights, reading.fresh, programs.place(tokens), np.int32(at))
        starts = (*reading.starts[:number], start + size, *reading.starts[number + 1 :])
        reading = reading._replace(fresh=fresh, starts=starts)
        if keep and self.stores(number):
            self._keep(reading, number, start)
        return reading

    def expect(self, entries: Sequence[Entry], others: Sequence[Request]) -> None:
        """Finds the prefixes that the prompts of a file's next requests share with each other or with
        `others`."""
        lengths = self._shared([request.tokens for _, request in entries], [other.tokens for other in others])
        whole = sum(len(request.tokens) for _, request in entries)
        if self.prefixes is None or 4 * sum(lengths) < whole:
            return
        self.prefixes.repeated += sum(lengths)
        if self.prefixes.repeated < WORTH or not self.programs.readers:
            return
        foreign: dict[Translated, list[int]] = {
            reader.foreign: self._shared(
                [reader.tokens(request) for _, request in entries], [reader.tokens(other) for other in others]
            )
            for reader in self.programs.readers
            if reader.foreign is not None
        }
        for n, (number, request) in enumerate(entries):
            cut = {
                model: ids[: foreign[model][n] + 1] if model in foreign else ids[:1]
                for model, ids in request.foreign.items()
            }
            self.shared[number] = Request(request.tokens[: lengths[n] + 1], request.settings, foreign=cut)

    def _shared(self, prompts: Sequence[Any], others: Sequence[Any]) -> list[int]:
        """shared_lengths() rounded down to whole blocks, without each prompt's last token."""
        lengths = shared_lengths([[*tokens[:-1]] for tokens in prompts], [[*tokens] for tokens in others])
        return [length // self.size * self.size for length in lengths]

    def ahead(self, reading: Reading) -> list[Request]:
        """The shared prefixes to read and cache before the prompts of a reading."""
        requests = []
        for number, _ in reading.placed.values():
            request = self.shared.get(number)
            if request is not None:
                key = tuple(request.tokens), *map(tuple, request.foreign.values())
                if key not in self.read_ahead:
                    requests.append(request)
                self.read_ahead.add(key)
        return requests

    def shares(self, reading: Reading) -> bool:
        """Whether some prompt of a reading has a shared prefix and the width holds a chunk."""
        return reading.width >= self.size and any(n in self.shared for n, _ in reading.placed.values())

    def _next(self, reading: Reading) -> int | None:
        """The first reader that has not read all prompts, or None. The first round reads a prompt's last
        token."""
        for number, reader in enumerate(self.programs.readers):
            longest = max(len(reader.tokens(request)) for _, request in reading.placed.values())
            if reading.starts[number] < longest - 1:
                return number
        return None

    def _segments(self, reading: Reading, number: int, request: Request) -> list[list[Any]]:
        """For each cached block of a prompt, the segment of each of the reader's models."""
        if self.prefixes is None or not self.stores(number):
            return []
        blocks = blocks_of(self.programs.readers[number].tokens(request), self.size)
        by_owner = [self.prefixes.find(owner, blocks) for owner in self._owners(reading, number)]
        return [list(segments) for segments in zip(*by_owner, strict=False)]

    def _put(
        self, reading: Reading, number: int, segments: list[Any], places: list[int], start: int
    ) -> Reading:
        programs, reader, rest = self.programs, self.programs.readers[number], iter(segments)
        nest = each(lambda _, reads: next(rest) if reads else None, reader.models, reader.reads)
        rows = np.isin(np.arange(reading.rows * programs.devices), places)
        put = programs.put(reading.rows, reading.width, number, self.size)
        fresh = programs.call(put, reading.fresh, nest, programs.place(rows), np.int32(start))
        return reading._replace(fresh=fresh)

    def _keep(self, reading: Reading, number: int, start: int) -> None:
        """Caches the chunk that was just read at `start`."""
        if self.prefixes is None:
            return
        programs, reader, owners = self.programs, self.programs.readers[number], self._owners(reading, number)
        for place, (_, request) in reading.placed.items():
            blocks = blocks_of(reader.tokens(request), self.size)[: start // self.size + 1]
            known = [len(self.prefixes.find(owner, blocks)) for owner in owners]
            if len(blocks) * self.size != start + self.size or len(blocks) - 1 not in known:
                continue
            cut = programs.cut(reading.rows, reading.width, number, self.size)
            at = (np.int32(place // reading.rows), np.int32(place % reading.rows), np.int32(start))
            segments = leaves_of(reader.models, programs.call(cut, reading.fresh, *at))
            for owner, segment in zip(owners, [s for s in segments if s is not None], strict=True):
                self.prefixes.add(owner, blocks, segment)

    def _owners(self, reading: Reading, number: int) -> list[Owner]:
        """The owner of the segments of each of the reader's models."""
        programs, reader = self.programs, self.programs.readers[number]
        if number not in self.owners:
            shapes = programs.segments(reading.rows, reading.width, number, self.size)
            nests = reader.reads, reader.models, programs.params, shapes
            parts = zip(*(leaves_of(reader.models, nest) for nest in nests), strict=True)
            self.owners[number] = [Owner(*rest) for reads, *rest in parts if reads]
        return self.owners[number]
