"""Text in, text out: Cascade, the API over generate.

    cascade = Cascade.load(drafter_folder, verifier_folder)  # or speccascade_jax.load("demo")
    for output in cascade.generate(["Where is the station?"], method="token_v3", alpha=0.3):
        print(output.text, output.counts)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax import checkpoints
from speccascade_jax.config import DecodeConfig, dtype_of
from speccascade_jax.core.baselines import BASELINES, CONFIDENCES, Baseline, Trace
from speccascade_jax.core.decoding import Autoregressive, Origin, Sampler, Speculative
from speccascade_jax.core.methods import check_sampling
from speccascade_jax.core.metrics import Counters, Tally
from speccascade_jax.core.rules import METHODS, Method
from speccascade_jax.core.typing import LanguageModel, SamplingOptions
from speccascade_jax.inference.engine import Clock, Engine, Job
from speccascade_jax.inference.tokenizer import Tokenizer, up_to_stop
from speccascade_jax.models.quantization import wants_packing
from speccascade_jax.parallel import tensor_mesh, tensor_sharding

Array = jax.Array
REWRITTEN = 2**31  # a sequence cascade's second text draws its random numbers as this many inputs later


@dataclasses.dataclass(frozen=True)
class Output:
    """One decoded input."""

    index: int
    source: str
    text: str
    tokens: list[int]             # what ends them (the end-of-sequence token, a stop sequence) included
    origin: list[str]             # who wrote each: draft, correction, bonus; model (autoregressive)
    counts: dict[str, Any]        # SPEC section 7; empty for an empty input
    truncated: bool = False       # the input was cut to max_source_length


@dataclasses.dataclass
class Cascade:
    """A drafter, a verifier and their common vocabulary."""

    drafter: LanguageModel
    verifier: LanguageModel
    drafter_params: Any
    verifier_params: Any
    tokenizer: Tokenizer
    prefix: str = ""
    max_source_length: int = 80   # tokens, the one that begins or ends a source included
    max_new_tokens: int = 80
    mesh: Mesh | None = None      # devices (parallel.make_mesh) that share the rows, each with all parameters
    suffix: str = ""
    stop: tuple[str, ...] = ()    # each ends an output as the end of the sequence does, and is cut off

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which ends every output: leave it out.")
        if self.mesh is not None:
            self.drafter_params, self.verifier_params = jax.device_put(
                (self.drafter_params, self.verifier_params), NamedSharding(self.mesh, P()))
        self.engine = Engine(self.max_new_tokens, self.tokenizer.eos_id, self.tokenizer.pad_id, self.mesh)

    @classmethod
    def load(cls, drafter: str | Path, verifier: str | Path, *, dtype: Any = jnp.float32,
             tokenizer: str | Path | None = None, tensor_parallel: int = 1, **fields: Any) -> "Cascade":
        """From two checkpoints, and a `tokenizer` file that stands for theirs where given. Each model's
        parameters are cut over `tensor_parallel` devices as they are read.

        Raises ValueError where the two do not fit each other.
        """
        cut = (lambda path: None) if tensor_parallel == 1 else (lambda path: partial(
            tensor_sharding, tensor_mesh(tensor_parallel), checkpoints.config_of(str(path))))
        small, large = (checkpoints.load(path, dtype, cut(path), packed=wants_packing(dtype))
                        for path in (drafter, verifier))
        vocabulary, other = (Tokenizer(tokenizer or model.tokenizer_file()) for model in (large, small))
        if vocabulary.pieces() != other.pieces():
            raise ValueError(f"the tokenizers of {drafter} ({other.size} pieces) and {verifier} "
                             f"({vocabulary.size} pieces) differ; a cascade needs one vocabulary.")
        sizes = small.model.vocab_size, large.model.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(f"the drafter's vocabulary has {sizes[0]} entries, the verifier's {sizes[1]}; "
                             "a cascade needs one vocabulary.")
        if vocabulary.size > sizes[1]:
            raise ValueError(f"the tokenizer {tokenizer or large.tokenizer} has {vocabulary.size} pieces, "
                             f"the models only {sizes[1]}: it belongs to other models.")
        return cls(small.model, large.model, small.params, large.params, vocabulary, **fields)

    @classmethod
    def from_config(cls, config: DecodeConfig, mesh: Mesh | None = None) -> "Cascade":
        """The pair a DecodeConfig names. Raises ValueError with the remedy where it cannot be had."""
        for role, path in (("drafter", config.drafter), ("verifier", config.verifier)):
            if not (checkpoints.is_remote(path) or Path(path).is_dir()):
                raise ValueError(f"the {role}'s checkpoint {path} is missing. "
                                 f"{config.missing or f'Give its folder with --{role}.'}")
        dtype = dtype_of(config)
        for name in ("batch_size", "max_new_tokens", "max_source_length"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1.")
        return cls.load(config.drafter, config.verifier, dtype=jnp.dtype(dtype),
                        tokenizer=config.tokenizer, prefix=config.prefix,
                        max_source_length=config.max_source_length, max_new_tokens=config.max_new_tokens,
                        tensor_parallel=config.tensor_parallel, mesh=mesh, suffix=config.suffix,
                        stop=config.stop)

    @property
    def clock(self) -> Clock:
        return self.engine.clock

    def sampler(self, method: str, block_size: int) -> tuple[Sampler, Any]:
        """The sampler of a method, and its parameters."""
        if method == "verifier":
            return Autoregressive(self.verifier), self.verifier_params
        if method == "drafter":
            return Autoregressive(self.drafter), self.drafter_params
        if method in BASELINES:
            sampler = BASELINES[method].sampler(self.drafter, self.verifier)
            return sampler, (self.drafter_params if method in CONFIDENCES else
                             (self.drafter_params, self.verifier_params))
        return (Speculative(Autoregressive(self.drafter), self.verifier, METHODS[method], block_size),
                (self.drafter_params, self.verifier_params))

    def encode(self, texts: Sequence[str], truncate: bool = False) -> tuple[list[list[int]], list[bool]]:
        """Token ids, [] for blank texts, and which texts were cut.

        Raises ValueError for a text longer than max_source_length unless `truncate`.
        """
        rows = self.tokenizer.encode_batch([self.prefix + text + self.suffix for text in texts])
        limit, cut = self.max_source_length, []
        for n, (row, text) in enumerate(zip(rows, texts, strict=True)):
            cut.append(bool(text.strip()) and len(row) + 1 > limit)
            if cut[-1] and not truncate:
                raise ValueError(f"input {n} has {len(row) + 1} tokens, the limit is {limit}: shorten it, "
                                 "raise --max-source-length, or cut it with --truncate.")
            rows[n] = self.tokenizer.framed(row, limit) if text.strip() else []
        return rows, cut

    def generate(self, texts: Iterable[str], *, method: str = "speculative", alpha: float = 0.0,
                 block_size: int = 5, temperature: float = 0.0, top_k: int | None = None,
                 top_p: float | None = None, seed: int = 0, batch_size: int = 1, truncate: bool = False,
                 first_index: int = 0) -> Iterator[Output]:
        """Decodes `texts` and yields their outputs in order, as soon as they are known.

        An output depends on its text, on `seed` and on its index (counted from `first_index`),
        never on its batch. Blank texts give empty outputs. Each device decodes `batch_size` rows.
        """
        options = SamplingOptions(temperature, top_p, top_k)
        check_sampling(method, alpha, block_size, options, self.verifier.vocab_size)
        window: list[tuple[int, str]] = []
        # Rows are sorted by length within a window, so that a batch pads little.
        rows = batch_size * self.engine.devices
        capacity = 1 if rows == 1 else 8 * rows
        shared = options, alpha, seed, batch_size, truncate
        decode = self._rewrite if method in CONFIDENCES else self._decode
        for item in enumerate(texts, first_index):
            window.append(item)
            if len(window) == capacity:
                yield from decode(window, method, block_size, *shared)
                window = []
        yield from decode(window, method, block_size, *shared)

    def stream(self, text: str, *, method: str = "speculative", alpha: float = 0.0, block_size: int = 5,
               temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
               seed: int = 0, index: int = 0) -> Iterator[str]:
        """The text so far after every round; the last is generate's output for the same index."""
        options = SamplingOptions(temperature, top_p, top_k)
        check_sampling(method, alpha, block_size, options, self.verifier.vocab_size)
        if method in CONFIDENCES:  # nothing of its text is certain before the end
            yield from (output.text for output in self.generate(
                [text], method=method, alpha=alpha, temperature=temperature, top_k=top_k, top_p=top_p,
                seed=seed, first_index=index))
            return
        [row], _ = self.encode([text])
        if not row:
            return
        job = Job(*self.sampler(method, block_size), options, alpha, seed)
        for state in self.engine.stream(job, row, index, self.bucket(len(row))):
            tokens = state.tokens[0, :int(state.length[0])].tolist()
            stopped = up_to_stop(self.tokenizer, tokens, self.stop)
            yield stopped[1] if stopped else self.tokenizer.decode(tokens)
            if stopped:
                return

    def precompile(self, *, method: str = "speculative", block_size: int = 5, temperature: float = 0.0,
                   top_k: int | None = None, top_p: float | None = None, batch_size: int = 1) -> None:
        """Compiles what generate() with these arguments will run, for every source length. alpha, seed
        and the values of temperature and top_p do not matter."""
        options = SamplingOptions(temperature, top_p, top_k)
        rules: dict[str, Method | Baseline] = {**METHODS, **BASELINES}
        check_sampling(method, rules[method].low if method in rules else 0.0, block_size, options,
                       self.verifier.vocab_size)
        for own in (method, "verifier") if method in CONFIDENCES else (method,):
            job = Job(*self.sampler(own, block_size), options, 0.0, 0)
            widths = sorted({self.bucket(n) for n in range(1, self.max_source_length + 1)})
            self.engine.precompile(job, batch_size, widths, by_round=bool(self.stop))

    def bucket(self, length: int) -> int:
        """`length` rounded up, so that at most eight source lengths are compiled."""
        step = -(-self.max_source_length // 8 // 16) * 16 or 16
        return min(-(-length // step) * step, max(self.max_source_length, 1))

    def _rewrite(self, window, method, block_size, options, alpha, *shared) -> list[Output]:
        """A sequence cascade: the drafter's texts, and the verifier's for those it is not sure of."""
        drafts = self._decode(window, method, block_size, options, alpha, *shared)
        traces = [np.array(draft.counts.pop("log_q", [])) for draft in drafts]
        deferred = [n for n, log_q in enumerate(traces)
                    if log_q.size and CONFIDENCES[method](log_q) < 1 - alpha]
        rewritten = self._decode([(window[n][0] + REWRITTEN, window[n][1]) for n in deferred], "verifier",
                                 block_size, options, alpha, *shared)
        counts = {}
        for n, draft in enumerate(drafts):
            size = len(draft.tokens)
            counts[n] = {"drafter_passes": size, "rounds": 0, "drafted": size, "accepted": size,
                         "deferred": 0, "emitted": size} if size else {}
        for n, output in zip(deferred, rewritten, strict=True):
            size = len(output.tokens)
            counts[n] |= {"rounds": size, "accepted": 0, "deferred": counts[n]["drafted"], "emitted": size}
            drafts[n] = dataclasses.replace(output, index=window[n][0])
        return [dataclasses.replace(draft, counts=counts[n], origin=[
            "correction" if counts[n].get("rounds") else "draft"] * len(draft.tokens))
                for n, draft in enumerate(drafts)]

    def _decode(self, window, method, block_size, options, alpha, seed, batch_size, truncate) -> list[Output]:
        rows, cut = self.encode([text for _, text in window], truncate)
        outputs: dict[int, Output] = {}
        order = [n for n, row in enumerate(rows) if row]
        job = Job(*self.sampler(method, block_size), options, alpha, seed)
        for slots, result in self.engine.decode(job, [rows[n] for n in order], [window[n][0] for n in order],
                                                batch_size, self.bucket,
                                                self._ends if self.stop else None):
            if (result.tokens >= self.verifier.vocab_size).any():
                raise ValueError("a model gave logits that are not numbers: the checkpoint is damaged, or "
                                 "dtype bfloat16 is too narrow for it.")
            for slot, place in slots.items():
                n = order[place]
                tokens = result.tokens[slot, :int(result.length[slot])].tolist()
                stopped = up_to_stop(self.tokenizer, tokens, self.stop)
                tokens, text = stopped or (tokens, self.tokenizer.decode(tokens))
                origin = [Origin(o).name.lower() for o in result.origin[slot, :len(tokens)]]
                index, source = window[n]
                outputs[n] = Output(index, source, text, tokens, origin, row_counts(result.counts, slot),
                                    cut[n])
        return [outputs.get(n) or Output(index, source, "", [], [], {})
                for n, (index, source) in enumerate(window)]

    def _ends(self, tokens: list[int]) -> bool:
        return up_to_stop(self.tokenizer, tokens, self.stop) is not None


def row_counts(counts: Any, row: int) -> dict[str, Any]:
    """One row of a generation's counts as plain numbers."""
    if isinstance(counts, Tally):
        return {name: int(value[row]) for name, value in counts._asdict().items()}
    if isinstance(counts, Trace):
        return {"log_q": counts.log_q[row][counts.drawn[row] > 0].tolist()}
    if isinstance(counts, tuple) and not isinstance(counts, Counters):
        drafter, own = counts
        values = {name: np.asarray(value)[row].tolist() for name, value in own._asdict().items()}
        return {"drafter_passes": int(jax.tree.leaves(drafter)[0][row]), **values}
    return {"model_passes": int(np.asarray(counts)[row])}
