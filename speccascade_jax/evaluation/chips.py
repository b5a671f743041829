"""The cost of a plan on TPUs elsewhere: lower bounds from the TPU compiler and published figures."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import Autoregressive, HandOver
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.evaluation import tpus
from speccascade_jax.evaluation.profiling import bytes_read, bytes_used, local_bytes
from speccascade_jax.models import Config
from speccascade_jax.models.stacking import stackable
from speccascade_jax.planning.planner import best
from speccascade_jax.planning.prediction import Candidates, PlannedHierarchy
from speccascade_jax.planning.readings import Reading
from speccascade_jax.scheduling.programs import Clock, Plan

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # batch sizes to consider
MEMORY_SHARE = 0.9  # of a chip's memory for parameters and caches; the rest is for a round's arrays


class DescribedModel:
    """A model on described chips, as shapes without values, for rows of one width."""

    def __init__(self, config: Config, chips: "Chips"):
        self.config, self.chips = config, chips
        self.plain = tpus.model_for(config, chips.dtype)
        self.model = stackable(self.plain)
        self.plain_params, self.params = (
            chips.described.params(model, chips.dtype) for model in (self.plain, self.model)
        )

    @cached_property
    def cache(self) -> Any:
        """The shapes and shardings of one row's cache, obtained by compiling the prefill."""
        chips, config = self.chips, self.config
        plan = Plan(Autoregressive(self.model), chips.new_tokens, config.eos_id, config.vocab_size)
        programs = tpus.Described(plan, self.params, None, Clock())
        return programs._state(1, chips.source_length).caches

    @cached_property
    def weight_bytes(self) -> float:
        """The bytes of parameters that a chip reads in a call."""
        return float(bytes_read(self.plain, self.plain_params))

    @cached_property
    def row_bytes(self) -> float:
        """The bytes of one row's cache on a chip, all of which a call reads."""
        return float(sum(map(local_bytes, tpus.buffers_of(self.cache))))

    @property
    def held_bytes(self) -> float:
        """The bytes of parameters on a chip."""
        return float(sum(map(local_bytes, jax.tree.leaves(self.params))))

    @cached_property
    def call_flops(self) -> tuple[float, float]:
        """A chip's share of the FLOP of a call for one row: for the first token, and for each further one."""

        def flops(tokens: int) -> float:
            read = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
            traced = jax.make_jaxpr(self.model.extend)(self.params, read, self.cache)
            return tpus.flops(traced.jaxpr) / self.chips.devices

        return flops(1), flops(2) - flops(1)

    def call_seconds(self, rows: int, longest: int) -> Float[np.ndarray, " N"]:
        """Lower bounds of the seconds of calls that read n = 0 .. longest tokens of each row."""
        reading = (self.weight_bytes + rows * self.row_bytes) / self.chips.chip.bandwidth
        first, further = self.call_flops
        work = rows * (first + (np.arange(longest + 1) - 1) * further) / self.chips.chip.rate
        return np.maximum(reading, work)

    @cached_property
    def prompt_seconds(self) -> float:
        """A lower bound of the seconds to read one prompt."""
        chips = self.chips
        source = jax.ShapeDtypeStruct((1, chips.source_length), jnp.int32)
        length = jax.ShapeDtypeStruct((1,), jnp.int32)

        def prefill(params: Any, *inputs: Any) -> Any:
            return self.plain.prefill(params, *inputs, chips.source_length + chips.new_tokens)

        read = bytes_used(prefill, self.plain_params, source, length)
        traced = jax.make_jaxpr(prefill)(self.plain_params, source, length)
        work = tpus.flops(traced.jaxpr) / chips.devices
        return max(read / chips.chip.bandwidth, work / chips.chip.rate)


@dataclasses.dataclass(frozen=True)
class Chips:
    """Chips that share each model's parameters, and the texts that they decode."""

    topology: str  # for example v5e:2x2
    devices: int
    dtype: str
    source_length: int
    new_tokens: int

    @cached_property
    def chip(self) -> tpus.Chip:
        return tpus.checked(self.topology)

    @cached_property
    def described(self) -> tpus.DescribedDevices:
        return tpus.DescribedDevices(self.devices, tpus.devices_of(self.topology))


@dataclasses.dataclass(frozen=True, eq=False)
class ChipPlan:
    """The fastest plan for one batch size."""

    rows: int
    plan: PlannedHierarchy
    verification: str
    candidates: Candidates

    @property
    def tokens_per_second(self) -> float:
        """The throughput while all rows are busy."""
        return self.rows / self.plan.seconds_per_token

    @property
    def round_seconds(self) -> float:
        """The seconds of a verifier call and the drafting before it."""
        chosen = [self.candidates.names.index(name) for name in self.plan.models]
        once = self.candidates.once[chosen].sum()
        return float((self.plan.seconds_per_token - once) / self.plan.passes_per_token[-1])

    @property
    def prompt_seconds(self) -> float:
        chosen = [self.candidates.names.index(name) for name in self.plan.models]
        return float(self.candidates.text_seconds[chosen].sum() / self.rows)

    @property
    def emitted(self) -> Float[np.ndarray, " L"]:
        """[x]: the probability that a round writes x tokens."""
        if len(self.plan.models) == 1:
            return np.array([0.0, 1.0])
        pair = tuple(map(self.candidates.names.index, self.plan.models[-2:]))
        survives = self.candidates.survival[pair][: self.plan.block_sizes[-1] + 1]
        law = -np.diff(survives, prepend=1.0, append=0.0)
        return law / law.sum()


def plans_by_rows(
    members: Sequence[DescribedModel],
    names: Sequence[str],
    reading: Reading,
    max_block: int,
    hand_over: HandOver,
) -> Iterator[ChipPlan]:
    """Yields the fastest plan for each batch size that fits, over all members, block sizes and verifications;
    on a tie, the first verification. Raises FieldError if not even one row fits."""
    last, chips = len(members) - 1, members[0].chips
    for rows in ROWS:
        held = sum(member.held_bytes + rows * member.row_bytes for member in members)
        if held > MEMORY_SHARE * chips.chip.memory:
            if rows == ROWS[0]:
                raise FieldError(
                    "tensor_parallel",
                    chips.devices,
                    "share the models among more chips, or use smaller ones or int8.",
                    f"the models take {held / 1e9:.1f} GB of each of {chips.devices} chips, which has "
                    f"{chips.chip.memory / 1e9:.0f} GB",
                )
            return
        seconds = np.stack([member.call_seconds(rows, max_block + 1) for member in members])
        # All rows wait while a prompt is read, so a text waits for the prompts of all rows.
        prompts = rows * np.array([member.prompt_seconds for member in members])
        plans = []
        for name, way in VERIFICATIONS.items():
            runs = {(j, last): reading.runs(j, way, max_block) for j in range(last)}
            lengths = tuple(map(int, reading.lengths))
            candidates = Candidates(tuple(names), seconds, reading.acceptance, lengths, prompts, None, runs)
            plans.append(ChipPlan(rows, best(candidates, max_block, hand_over), name, candidates))
        yield min(plans, key=lambda choice: choice.plan.seconds_per_token)
