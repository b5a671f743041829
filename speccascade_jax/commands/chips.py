"""plan.py --tpu: a plan for TPUs elsewhere, and the number of chips that a load needs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int
from rich.console import Console

from speccascade_jax.commands.commandline import at_least, console, table_of, whole_words
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import tpus
from speccascade_jax.evaluation.chips import ROWS, ChipPlan, Chips, DescribedModel, plans_by_rows
from speccascade_jax.inference.progress import track
from speccascade_jax.planning.prediction import even_acceptance
from speccascade_jax.planning.readings import Reading
from speccascade_jax.planning.simulation import Fleet, SimulatedServer, fewest, rounds_of_texts
from speccascade_jax.serving.engine import MAX_QUEUE, ROUNDS

REQUESTS = 4000  # the number of simulated requests


@dataclasses.dataclass(frozen=True)
class Demand:
    """The load from clients, and the latency that they are promised."""

    requests_per_second: float
    tokens: int | None  # mean tokens per answer; None: that of the measured texts
    first_token_ms: float  # for 99% of requests

    def check(self) -> None:
        for name in ("requests_per_second", "first_token_ms"):
            if not 0 < getattr(self, name) < 1e9:
                raise FieldError(name, getattr(self, name), "it must be above 0, and below 1e9.")
        at_least(1, tokens=self.tokens)

    def texts(self, reading: Reading) -> Int[np.ndarray, " N"]:
        """The lengths of simulated answers: those of the measured texts, scaled to the mean."""
        mean = float(np.mean(reading.lengths))
        stretch = 1.0 if self.tokens is None else self.tokens / mean
        drawn = np.random.default_rng(0).choice(reading.lengths, REQUESTS)
        return np.maximum(np.rint(drawn * stretch), 1).astype(int)


def fleet_of(choice: ChipPlan, load: Demand, reading: Reading) -> Fleet | None:
    """The smallest fleet of servers that handles the load with this plan; None if no number suffices."""
    tokens = load.texts(reading)
    server = SimulatedServer(choice.rows, choice.round_seconds, choice.prompt_seconds, MAX_QUEUE, ROUNDS)
    rounds = rounds_of_texts(choice.emitted, tokens)
    return fewest(server, tokens, rounds, load.requests_per_second, load.first_token_ms / 1000)


def plan_for_chips(
    run: DecodeConfig,
    names: Sequence[str],
    topology: str,
    acceptance: str,
    max_block: int,
    load: Demand | None,
) -> ChipPlan:
    """Prints the plans for each batch size that fits, and the compiler's figures for the best one. With a
    load, that is the plan that needs the fewest chips, otherwise the plan at the config's batch size. Returns
    it."""
    screen = console()
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot store programs for other devices
    reading = Reading.load(acceptance, names, run.settings)
    chips = Chips(
        topology, run.tensor_parallel, tpus.dtype_of(run), run.max_source_length, run.max_new_tokens
    )
    described = tpus.devices_of(topology)
    if chips.devices > len(described):
        raise FieldError("tensor_parallel", chips.devices, f"{topology} has {len(described)} chips.")
    shapes = tpus.shapes_of(run)
    for name, attached in zip(names, map(tpus.attached_of, shapes), strict=True):
        if attached is not None:
            raise FieldError(
                "models" if run.models else "drafter",
                name,
                "compile the pair with scripts/benchmark.py --tpu.",
                f"{attached.name} reads its verifier's states; --tpu can only plan with independent models",
            )
    tpus.check_vocabularies(shapes)
    members = [DescribedModel(config, chips) for config in shapes]
    by_rows = plans_by_rows(members, names, reading, max_block, run.hand_over)
    plans = list(track(by_rows, "planning, batch sizes", len(ROWS)))
    fleets = [
        None if load is None else fleet_of(choice, load, reading)
        for choice in track(plans, "simulating, batch sizes")
    ]
    show(plans, fleets, chips, load, screen)
    if load is None:
        best = [choice for choice in plans if choice.rows <= run.batch_size][-1]
    else:
        borne = [(fleet, choice) for fleet, choice in zip(fleets, plans, strict=True) if fleet is not None]
        if not borne:
            raise FieldError(
                "first_token_ms",
                load.first_token_ms,
                "raise it, or choose faster chips.",
                "no number of these chips meets that target",
            )
        fleet, best = min(borne, key=lambda pair: (pair[0].servers, pair[1].rows))
        screen.print(
            f"Chips needed: {fleet.servers * chips.devices} (servers with {chips.devices} each: "
            f"{fleet.servers}; rows per server: {best.rows}).",
            soft_wrap=True,
        )
    if len(best.plan.models) == 2:
        confirm(best, members, names, chips, described, screen)
    return best


def show(
    plans: Sequence[ChipPlan],
    fleets: Sequence[Fleet | None],
    chips: Chips,
    load: Demand | None,
    screen: Console,
) -> None:
    columns = "rows", "models", "block sizes", "verified by", "ms per token of a row", "tokens per second"
    times = whole_words(*columns, title=f"lower bounds of times on {chips.devices} of {chips.topology}")
    for choice in plans:
        plan = choice.plan
        times.add_row(
            str(choice.rows),
            ", ".join(plan.models),
            ", ".join(map(str, plan.block_sizes)) or "-",
            choice.verification if plan.block_sizes else "-",
            f"{1e3 * plan.seconds_per_token:.3f}",
            f"{choice.tokens_per_second:.0f}",
        )
    screen.print(times)
    if load is None:
        return
    headings = "rows", "chips", "busy rows", "first token, ms: p50, p99", "last token, ms: p50, p99"
    table = whole_words(*headings, title=f"simulation of {load.requests_per_second:g} requests per second")
    for choice, fleet in zip(plans, fleets, strict=True):
        table.add_row(str(choice.rows), *cells_of(fleet, chips))
    screen.print(table)


def cells_of(fleet: Fleet | None, chips: Chips) -> list[str]:
    if fleet is None:
        return ["no number suffices", "-", "-", "-"]
    said = fleet.served.summary()
    return [
        str(fleet.servers * chips.devices),
        f"{fleet.served.busy:.0%}",
        *(f"{said[f'{key}_p50']:.1f}, {said[f'{key}_p99']:.1f}" for key in ("first_token_ms", "whole_ms")),
    ]


def confirm(
    choice: ChipPlan,
    members: Sequence[DescribedModel],
    names: Sequence[str],
    chips: Chips,
    described: list[Any],
    screen: Console,
) -> None:
    """Compiles the plan's programs, and prints the bytes that a round reads and any program that does not
    fit."""
    drafter, verifier = (members[names.index(name)].config for name in choice.plan.models)
    pair = names.index(choice.plan.models[0]), names.index(choice.plan.models[1])
    [size] = choice.plan.block_sizes
    shapes = tpus.Shapes(
        drafter,
        verifier,
        chips.source_length,
        chips.new_tokens,
        size,
        "speculative",
        choice.rows,
        chips.devices,
        chips.dtype,
        verification=choice.verification,
    )
    acceptance = round(even_acceptance(choice.candidates.survival[pair][: size + 1]), 3)
    for title, figures in tpus.figures(tpus.Pair(shapes, described), chips.topology, acceptance):
        if not figures.get("fits", False):  # a program that fits needs no table
            screen.print(table_of(figures, title))
