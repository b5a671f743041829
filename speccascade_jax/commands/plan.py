"""Which models draft for the verifier, and how many tokens: the plan of least predicted time on this machine.

    python scripts/plan.py --config=demo --check --output plan.py
    python scripts/plan.py --config=demo --models SMALL MIDDLE LARGE
    python scripts/decode.py --config=plan.py

Every call is timed, and how often each model accepts another's tokens is read off the largest one's texts.
With --acceptance-to this is written to a file, from which a plan for TPUs that are not at hand can be made:

    python scripts/plan.py --config=demo --acceptance-to demo.json
    python scripts/plan.py --config=demo --tpu=v5e:2x2 --acceptance-from demo.json --requests-per-second 500
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float
from rich.console import Console

from speccascade_jax import config as configs
from speccascade_jax.commands.chips import Demand, plan_for_chips
from speccascade_jax.commands.commandline import (
    at_least,
    at_most,
    config_of,
    console,
    exit_code,
    flag_of,
    parsed,
    task_of,
    whole_words,
)
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Scheme
from speccascade_jax.core.nests import network_of
from speccascade_jax.core.samplers.lookup import split_drafter
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.evaluation import tpus
from speccascade_jax.evaluation.profiling import Contestant, in_turn
from speccascade_jax.evaluation.quality import interval, resamples
from speccascade_jax.inference.inputs import read_texts
from speccascade_jax.inference.outputs import check_targets, write_whole
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.planning.costs import WIDTHS, at_once, call_seconds, step_watch
from speccascade_jax.planning.planner import best
from speccascade_jax.planning.prediction import (
    Candidates,
    PlannedHierarchy,
    even_acceptance,
    predict,
    triangle_violations,
)
from speccascade_jax.planning.readings import reading
from speccascade_jax.settings import Settings, named
from speccascade_jax.training.data import joined_examples
from speccascade_jax.vocabularies import VOCABULARIES

PLANNED = "Planned by scripts/plan.py"
STEP = "a token of the verifier's"
CHOSEN, PAIR, ALONE = "the plan", "best pair", "verifier alone"  # what is compared, by name
TRIALS = 3  # times that a text is decoded where plans are compared
BLOCKS = ("block_size", "max_block_size", "stop_below", "hand_over")  # what a planned config says of them
Runs = dict[str, tuple[PlannedHierarchy, Settings]]
"""By name: a chain of models and how it decodes."""
STOPS = (0.25, 0.12, 0.06)  # stop_below of the adaptive blocks that are compared with them


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags. All its
    models are candidates; the last is the verifier, whose distribution the output follows."""
    input: str | None = None
    """Texts to plan for (see decode.py); else the validation split of the config's task, or its examples."""
    limit: int = 64
    """How many of these texts to use."""
    max_block: int = 15
    """The most tokens that a model drafts; of one that drafts in one pass, at most what that writes."""
    most_models: int | None = None
    """The most models of a plan."""
    repetitions: int = 9
    """How often each call is timed."""
    check: bool = False
    """Decode with the plan, the best pair, also in adaptive blocks, and the verifier alone, and print their
    times."""
    output: str | None = None
    """The config file to write for the plan; with adaptive blocks if --check finds them surely faster."""
    acceptance_to: str | None = None
    """Write how often the models accept each other's tokens to this JSON file, for --acceptance-from."""
    acceptance_from: str | None = None
    """With --tpu: what --acceptance-to has written of these models, on any machine."""
    tpu: str | None = None
    """Plan for these chips, v5e:2x4 say, with times that TPU's compiler and the chips' public figures bound
    from below. No TPU is needed, and no weights are read; --tensor-parallel chips share each model."""
    requests_per_second: float | None = None
    """With --tpu: simulate servers under this load, and tell how many chips it needs."""
    tokens: int | None = None
    """With --requests-per-second: the tokens of an answer, on average (default: the measured texts')."""
    first_token_ms: float = 1000.0
    """With --requests-per-second: within this time 99 of 100 requests have their first tokens."""

    @property
    def demand(self) -> Demand | None:
        """What servers have to bear."""
        if self.requests_per_second is None:
            return None
        return Demand(self.requests_per_second, self.tokens, self.first_token_ms)


def read_inputs(arguments: Arguments) -> list[str]:
    run, limit = arguments.run, arguments.limit
    if arguments.input is not None:
        return read_texts(arguments.input, limit)
    if run.task is not None:
        task = task_of(arguments.config, run, None, "validation", None)
        if Path(task.validation).exists():
            return [source for source, _ in joined_examples(task, task.validation)[:limit]]
    if not run.examples:
        raise FieldError(
            "input",
            None,
            "give --input.",
            f"config {arguments.config} has neither a task whose texts are here nor examples",
        )
    return list(run.examples[:limit])


def check(arguments: Arguments) -> None:
    """Raises ValueError for what cannot be planned, before models are loaded."""
    a, run = arguments, arguments.run
    run.check()
    at_least(1, limit=a.limit, max_block=a.max_block, most_models=a.most_models, repetitions=a.repetitions)
    at_most(max(WIDTHS) - 1, max_block=a.max_block)
    if not run.lossless:
        raise FieldError("method", run.name, "give --method speculative: a plan is of lossless decoding.")
    if VOCABULARIES[run.vocabulary].drafts is not None:
        raise FieldError(
            "vocabulary",
            run.vocabulary,
            "give --vocabulary tli.",
            f"a plan needs every drafter's distribution, which {run.vocabulary} does not provide",
        )
    if model_free := split_drafter(run.roles[0][1])[0]:
        raise FieldError(
            "models" if run.models else "drafter",
            run.roles[0][1],
            "time it with scripts/benchmark.py.",
            f"a plan needs every drafter's distribution, which {model_free.name} does not have",
        )
    check_chips(a)
    if a.output is not None:
        path = Path(a.output)
        if path.suffix != ".py":
            raise FieldError("output", str(path), "a config file's name ends in .py.", f"--output is {path}")
        if path.is_file() and not path.read_bytes().startswith(f"# {PLANNED}".encode()):
            raise FieldError(
                "output",
                str(path),
                "delete it or name another.",
                f"--output is {path}, which holds something else",
            )
    written = {"--output": a.output, "--acceptance-to": a.acceptance_to}
    check_targets(written, {"--config": configs.path_of(a.config)})


def check_chips(a: Arguments) -> None:
    """Raises FieldError for flags of plans for other machines that do not go together."""
    if a.tpu is None:
        for name in ("acceptance_from", "requests_per_second"):
            if getattr(a, name) is not None:
                raise FieldError(name, getattr(a, name), "give --tpu, too.", f"{flag_of(name)} is for --tpu")
    else:
        tpus.checked(a.tpu)
        if a.acceptance_from is None:
            raise FieldError(
                "acceptance_from",
                None,
                "give a file that --acceptance-to has written.",
                "--tpu runs no model, so it cannot see how often drafts are accepted",
            )
        for name in ("input", "acceptance_to"):
            if getattr(a, name) is not None:
                raise FieldError(name, getattr(a, name), "leave it out.", "--tpu runs no model")
        if a.check:
            raise FieldError("check", True, "leave it out.", "--tpu runs no model")
    if a.demand is not None:
        a.demand.check()
    elif a.tokens is not None:
        raise FieldError("tokens", a.tokens, "give --requests-per-second, too.")


def check_members(arguments: Arguments, cascade: Cascade, names: tuple[str, ...]) -> None:
    """Raises FieldError for a drafter that reads what its verifier leaves, next to other models than that,
    and where a file for other machines is to be written."""
    networks = [network_of(model) for model in cascade.models]
    reads = [not getattr(network, "by_prefix", True) for network in networks[:-1]]
    if not any(reads):
        return
    if len(names) > 2 or networks[0] != networks[1]:
        drafter = names[reads.index(True)]
        raise FieldError(
            "models",
            list(names),
            f"name {drafter} and its verifier.",
            f"{drafter} drafts from what its own verifier has read",
        )
    if arguments.acceptance_to is not None:
        raise FieldError(
            "acceptance_to",
            arguments.acceptance_to,
            "leave it out.",
            f"{names[0]} drafts from what its verifier has read, and plans for TPUs take models that read by "
            "themselves",
        )


def measured(
    arguments: Arguments, cascade: Cascade, names: tuple[str, ...], texts: list[str], screen: Console
) -> tuple[Candidates, Contestant]:
    """The candidates with their costs here and their acceptances on `texts`; and what tells the machine's
    pace later: how long the verifier takes for a call of one token."""
    settings = arguments.run.settings
    alone = dataclasses.replace(settings, method="verifier", alpha=0.0, block_size=1)
    outputs = list(
        track(
            cascade.generate(texts, alone, truncate=True, batch_size=8),
            "the verifier's texts",
            len(texts),
            console=screen,
        )
    )
    read = reading(cascade, outputs, settings, arguments.max_block)
    if arguments.acceptance_to is not None:
        read.save(arguments.acceptance_to, names, settings)
    rows = cascade.encode(texts, truncate=True)[0]
    widest = arguments.max_block + 1
    widths = sorted({width for width in WIDTHS if width < widest} | {widest})

    def shown(work: Iterable[Any], name: str) -> Iterable[Any]:
        return track(work, name, console=screen)

    width = cascade.bucket(int(np.median(list(map(len, rows)))))
    seconds, besides = call_seconds(
        cascade, widths, settings, source_length=width, repetitions=arguments.repetitions, track=shown
    )
    watch = step_watch(cascade, settings, width)

    def step(index: int, text: str) -> tuple[float, None]:
        return watch(), None

    pace, once = text_seconds(cascade, names, seconds, besides, settings, texts, step, screen)
    way, last = VERIFICATIONS[settings.verification], len(names) - 1
    runs = {(j, last): read.runs(j, way, arguments.max_block) for j in range(last)}
    lengths = tuple(map(int, read.lengths))
    candidates = Candidates(
        names, pace * seconds, read.acceptance, lengths, once, pace * besides, runs, at_once(cascade.drafter)
    )
    return candidates, step


def text_seconds(
    cascade: Cascade,
    names: tuple[str, ...],
    seconds: Float[np.ndarray, "M N"],
    rounds: Float[np.ndarray, "M M"],
    settings: Settings,
    texts: list[str],
    step: Contestant,
    screen: Console,
) -> tuple[float, Float[np.ndarray, " M"]]:
    """Seconds of a text besides its calls: the verifier's, and how much more it is with each drafter. That is
    what is left of a text's time when its calls, as counted, are taken off: reading the source, entering from
    Python, and that the first rounds of a text are slower than those that are timed for long.

    And the machine's pace meanwhile: how many times as long as in `seconds` a `step` takes, one token of the
    verifier's. By that all calls are corrected.
    """
    block = min(4, seconds.shape[1] - 2)
    alone: Contestant = partial(decode, of_models(cascade, names, names[-1:]), settings_of((), settings))
    contestants = {names[-1]: alone, STEP: step}
    for name in names[:-1]:
        pair = of_models(cascade, names, (name, names[-1]))
        contestants[name] = partial(decode, pair, settings_of((block,), settings))
    runs = in_turn_here(contestants, cascade, texts, screen)
    # A difference of two times may be negative on a busy machine.
    pace = max(float(np.median(runs[STEP][0])), 1e-7) / seconds[-1, 1]
    a_pass = block + 1 if at_once(cascade.drafter) else 1

    def besides(name: str, calls: Float[np.ndarray, " N"], a_round: float) -> float:
        spent, outputs = runs[name]
        a_round += seconds[-1, block + 1]
        return float(
            np.mean(
                spent
                - pace
                * np.array(
                    [
                        output.counts["drafter_passes"] * calls[a_pass] + output.counts["rounds"] * a_round
                        if "rounds" in output.counts
                        else len(output.tokens) * calls[1]
                        for output in outputs
                    ]
                )
            )
        )

    *drafters, once = map(besides, names, seconds, rounds[:, -1])
    return pace, np.maximum([*(drafter - once for drafter in drafters), once], 0)


def show_candidates(candidates: Candidates, screen: Console) -> None:
    names, calls = candidates.names, candidates.call_seconds
    table = whole_words("tokens read", *names, title="ms of a call, and of a text besides its calls")
    for tokens in (n for n in WIDTHS if n < calls.shape[1]):
        table.add_row(str(tokens), *(f"{1e3 * seconds:.2f}" for seconds in calls[:, tokens]))
    table.add_row("a text besides", *(f"{1e3 * once:.2f}" for once in candidates.text_seconds))
    screen.print(table)
    show_pairs(
        "ms of a round besides its calls", "drafts of", "read by", names, 1e3 * candidates.besides, 2, screen
    )
    show_pairs("acceptance", "tokens of", "accepted by", names, candidates.acceptance, 3, screen)
    for j, i, k, excess in triangle_violations(candidates.acceptance):
        screen.print(
            f"the acceptances of {names[j]}, {names[i]} and {names[k]} break the triangle "
            f"inequality by {excess:.3f}: measured on too few texts."
        )


def show_pairs(
    title: str,
    row: str,
    column: str,
    names: tuple[str, ...],
    values: Float[np.ndarray, "M M"],
    digits: int,
    screen: Console,
) -> None:
    table = whole_words(row, *(f"{column} {name}" for name in names[1:]), title=title)
    for j, name in enumerate(names[:-1]):
        table.add_row(name, *("" if i <= j else f"{values[j, i]:.{digits}f}" for i in range(1, len(names))))
    screen.print(table)


def settings_of(block_sizes: tuple[int, ...], settings: Settings) -> Settings:
    """The settings of a cascade with these block sizes; without any, of the verifier alone."""
    if not block_sizes:
        return dataclasses.replace(settings, method="verifier", alpha=0.0, block_size=1)
    return dataclasses.replace(settings, method="speculative", alpha=0.0, block_size=block_sizes)


def of_models(cascade: Cascade, names: tuple[str, ...], models: Sequence[str]) -> Cascade:
    """Those of a cascade's models."""
    chosen = [names.index(name) for name in models]
    return dataclasses.replace(
        cascade,
        models=tuple(cascade.models[n] for n in chosen),
        params=tuple(cascade.params[n] for n in chosen),
    )


def decode(cascade: Cascade, settings: Settings, index: int, text: str) -> tuple[float, Output]:
    before = cascade.clock.decode_seconds
    [output] = cascade.generate([text], settings, first_index=index, truncate=True)
    return cascade.clock.decode_seconds - before, output


def in_turn_here(
    contestants: dict[str, Contestant], cascade: Cascade, texts: list[str], screen: Console
) -> dict[str, tuple[Float[np.ndarray, " texts"], list[Output]]]:
    """Of each contestant: seconds for each text, the median of TRIALS, and the outputs."""
    shapes = {
        cascade.bucket(len(row)): text
        for text, row in zip(texts, cascade.encode(texts, truncate=True)[0], strict=True)
        if row
    }
    for contestant in track(contestants.values(), "compiling", console=screen):
        for text in shapes.values():
            contestant(0, text)
    numbered = {
        name: (lambda n, text, contestant=contestant: contestant(n % len(texts), text))
        for name, contestant in contestants.items()
    }
    results = in_turn(numbered, track(texts * TRIALS, "timing", console=screen))
    return {
        name: (
            np.median(np.reshape([seconds for seconds, _ in runs], (TRIALS, -1)), axis=0),
            [output for _, output in runs[: len(texts)]],
        )
        for name, runs in results.items()
    }


def runs_of(plans: dict[str, PlannedHierarchy], settings: Settings) -> Runs:
    """How each plan decodes."""
    return {
        name: (plan, dataclasses.replace(settings_of(plan.block_sizes, settings), hand_over=plan.hand_over))
        for name, plan in plans.items()
    }


def adaptive_runs(pair: PlannedHierarchy, settings: Settings, max_block: int) -> Runs:
    """The pair in adaptive blocks of at most `most` tokens."""
    lossless = dataclasses.replace(
        settings, method="speculative", alpha=0.0, block_size="adaptive", max_block_size=max_block
    )
    return {f"adaptive, {stop:g}": (pair, dataclasses.replace(lossless, stop_below=stop)) for stop in STOPS}


def sampler_runs(run: DecodeConfig, target: PlannedHierarchy, names: tuple[str, ...]) -> Runs:
    """A config's samplers and lossless rules, over all the models: they are timed next to the plans, and not
    predicted."""
    whole = dataclasses.replace(target, models=names, block_sizes=())
    return {
        name: (whole, run.settings.by(entry))
        for name, entry in named(run.samplers).items()
        if isinstance(entry, Scheme) or entry.lossless
    }


class Measured(NamedTuple):
    """How long a run takes."""

    seconds: Float[np.ndarray, " texts"]  # of each text
    per_token: float
    speedup: tuple[float, float]  # quartiles over texts: how many times as fast as the verifier


def measured_times(
    runs: Runs, cascade: Cascade, names: tuple[str, ...], texts: list[str], step: Contestant, screen: Console
) -> tuple[float, dict[str, Measured]]:
    """The seconds of a `step` meanwhile, and each run's."""
    contestants = {STEP: step}
    for name, (plan, settings) in runs.items():
        contestants[name] = partial(decode, of_models(cascade, names, plan.models), settings)
    results = in_turn_here(contestants, cascade, texts, screen)
    now, times = float(np.median(results.pop(STEP)[0])), {}
    for name, (seconds, outputs) in results.items():
        tokens = np.array([len(output.tokens) for output in outputs])
        low, high = np.percentile((results[ALONE][0] / seconds)[tokens > 0], [25, 75])
        times[name] = Measured(seconds, float(seconds.sum() / tokens.sum()), (float(low), float(high)))
    return now, times


def show_runs(
    runs: Runs, plans: Collection[str], pace: float, times: dict[str, Measured], screen: Console
) -> None:
    """`pace`: how many times as long as in the plans a call took when `times` were measured. Predictions are
    at that pace: what is left between the two is not the machine's. Only `plans` have one, not adaptive
    blocks and a config's samplers."""
    table = whole_words(
        "plan",
        "models",
        "block sizes",
        *(("measured", "speedup (quartiles)") if times else ()),
        "predicted (ratio)",
        title="ms a token, and how many times as fast as the verifier alone",
    )
    whole = runs[ALONE][0].seconds_per_token
    for name, (plan, settings) in runs.items():
        sizes = f"up to {settings.max_block_size}" if settings.adaptive else "-"
        measured, predicted = list[str](), "-"
        if name in plans:
            sizes = ", ".join(map(str, plan.block_sizes)) or "-"
            milliseconds = 1e3 * pace * plan.seconds_per_token
            predicted = f"{milliseconds:.3f} ({whole / plan.seconds_per_token:.2f})"
        if times:
            seconds, (low, high) = times[name].per_token, times[name].speedup
            measured = [
                f"{1e3 * seconds:.3f}",
                f"{times[ALONE].per_token / seconds:.2f} ({low:.2f} to {high:.2f})",
            ]
        table.add_row(name, ", ".join(plan.models), sizes, *measured, predicted)
    screen.print(table)
    if times:
        screen.print(
            f"While plans were compared, {STEP} took {pace:.2f} times as long as when they were "
            "made: predictions are at that pace.",
            soft_wrap=True,
        )


def of_lookahead(candidates: Candidates, plan: PlannedHierarchy) -> dict[str, float]:
    """The knobs of the method lookahead for a pair: its acceptance, which depends on how drafts are verified,
    and a round's time in verifier steps."""
    if len(plan.models) != 2:
        return {}
    drafter, verifier = map(candidates.names.index, plan.models)
    seconds, (size,) = candidates.call_seconds, plan.block_sizes
    drafting = candidates.draft_seconds[drafter, size]
    if not candidates.at_once:  # it reads its last token, too
        drafting += seconds[drafter, 1]
    cost = drafting + candidates.round_seconds[drafter, verifier, size]
    survival = candidates.runs[drafter, verifier].survival(size)
    return {
        "acceptance": round(even_acceptance(survival), 3),
        "round_cost": round(float(cost / seconds[verifier, 1]), 3),
    }


def told(plan: PlannedHierarchy, settings: Settings) -> str:
    """A plan in words: its models and its blocks."""
    if len(plan.models) == 1:
        return f"{plan.models[0]} alone"
    sizes = ", ".join(map(str, plan.block_sizes))
    blocks = f"block size {sizes}" if len(plan.block_sizes) < 2 else f"block sizes {sizes}"
    if settings.adaptive:
        blocks = f"adaptive blocks of up to {settings.max_block_size}"
    return f"{', '.join(plan.models)}; {blocks}"


def write_config(
    path: str,
    arguments: Arguments,
    plan: PlannedHierarchy,
    paths: dict[str, str],
    heading: str,
    changes: dict[str, Any],
) -> None:
    """A config file that loads `config` with the plan's models and with `changes`."""
    loaded = configs.load(arguments.config)
    models = tuple(paths[name] for name in plan.models)
    chosen = dataclasses.replace(
        arguments.run, models=models, planned_for=models, method="speculative", alpha=0.0, **changes
    )
    changed = [
        f"{field.name}={getattr(chosen, field.name)!r}"
        for field in dataclasses.fields(chosen)
        if getattr(chosen, field.name) != getattr(loaded, field.name)
    ]
    write_whole(
        path,
        f"# {PLANNED} from {arguments.config!r}: {heading}.\n\n"
        "import dataclasses\n\nfrom speccascade_jax.config import load\n\n"
        f"config = dataclasses.replace(\n    load({arguments.config!r}),\n    "
        + ",\n    ".join(changed)
        + ")\n",
    )


def fastest(runs: Runs, times: dict[str, Measured]) -> str:
    """The plan; adaptive blocks where they are surely faster than it and the best pair were
    (95%, paired over texts), the fastest of those."""

    def surely(name: str) -> bool:
        drawn = resamples(len(times[name].seconds))
        rival, *planned = (times[run].seconds[drawn].sum(axis=1) for run in (name, CHOSEN, PAIR))
        return all(interval(other / rival)[0] > 1 for other in planned)

    rivals = [name for name, (_, settings) in runs.items() if settings.adaptive and surely(name)]
    return min(rivals, key=lambda name: times[name].per_token, default=CHOSEN)


def plan(arguments: Arguments) -> None:
    check(arguments)
    if arguments.tpu is not None:
        plan_for(arguments, arguments.tpu)
        return
    run, screen = arguments.run, console()
    texts = [text for text in read_inputs(arguments) if text.strip()]
    if not texts:
        raise FieldError("input", arguments.input, "give texts to plan for.", "all inputs are blank")
    cascade = Cascade.from_config(run)
    paths = short_names([path for _, path in run.roles])
    names = tuple(paths)
    check_members(arguments, cascade, names)
    longest = getattr(cascade.drafter, "drafts_at_once", None) or arguments.max_block
    arguments = dataclasses.replace(arguments, max_block=min(arguments.max_block, longest))
    candidates, step = measured(arguments, cascade, names, texts, screen)
    show_candidates(candidates, screen)
    plans = {CHOSEN: best(candidates, arguments.max_block, run.hand_over, arguments.most_models)}
    if len(names) > 1:
        pair = best(candidates, arguments.max_block, run.hand_over, 2)
        plans[PAIR] = pair if len(pair.models) == 2 else _any_pair(candidates, arguments.max_block)
    plans[ALONE] = predict(candidates, names[-1:], (), run.hand_over)
    runs = runs_of(plans, run.settings)
    now, times = candidates.call_seconds[-1, 1], dict[str, Measured]()
    if arguments.check:
        if PAIR in plans:
            runs |= adaptive_runs(plans[PAIR], run.settings, arguments.max_block)
        runs |= sampler_runs(run, plans[ALONE], names)
        now, times = measured_times(runs, cascade, names, texts, step, screen)
    show_runs(runs, plans, now / candidates.call_seconds[-1, 1], times, screen)
    if len(plans[CHOSEN].models) == 1:
        screen.print("No drafter is worth its time here: the verifier alone is predicted to be fastest.")
    if arguments.output is not None:
        name = fastest(runs, times)
        chosen, settings = runs[name]
        time = (
            f"{1e3 * times[name].per_token:.3f} ms a token measured"
            if times
            else f"{1e3 * chosen.seconds_per_token:.3f} ms a token predicted"
        )
        write_config(
            arguments.output,
            arguments,
            chosen,
            paths,
            f"{told(chosen, settings)}; {time}",
            {field: getattr(settings, field) for field in BLOCKS} | of_lookahead(candidates, chosen),
        )
        screen.print(
            f"written: {arguments.output} ({told(chosen, settings)}); "
            f"decode with --config={arguments.output}",
            soft_wrap=True,
        )


def plan_for(arguments: Arguments, topology: str) -> None:
    """A plan for chips that are not at hand."""
    run = arguments.run
    paths = short_names([path for _, path in run.roles])
    choice = plan_for_chips(
        run,
        tuple(paths),
        topology,
        arguments.acceptance_from or "",
        arguments.max_block,
        arguments.demand,
    )
    if arguments.output is not None:
        chosen = settings_of(choice.plan.block_sizes, run.settings)
        changes = {"block_size": chosen.block_size, "verification": choice.verification}
        heading = f"{told(choice.plan, chosen)}; {choice.rows} rows on {topology}"
        write_config(
            arguments.output,
            arguments,
            choice.plan,
            paths,
            heading,
            changes | {"batch_size": choice.rows},
        )


def _any_pair(candidates: Candidates, max_block: int) -> PlannedHierarchy:
    """The best pair, where the verifier alone is better."""
    names = candidates.names
    return min(
        (
            predict(candidates, (name, names[-1]), (size,))
            for name in names[:-1]
            for size in range(1, max_block + 1)
        ),
        key=lambda plan: plan.seconds_per_token,
    )


def short_names(paths: list[str]) -> dict[str, str]:
    """Name -> path: the paths' last parts, without an ending that all share (runs/NAME/export), or the whole
    paths where those are not all different."""
    parts = [Path(path).parts for path in paths]
    while len(parts) > 1 and min(map(len, parts)) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    last = [part[-1] for part in parts]
    return dict(zip(last if len(set(last)) == len(paths) else paths, paths, strict=True))


def parse(argv: list[str]) -> Arguments:
    name, run = config_of(argv, DecodeConfig, "demo")
    run = dataclasses.replace(run.by("speculative"), alpha=0.0, block_size=1, planned_for=())
    return parsed(Arguments, argv, "plan", __doc__, Arguments(run, name))


def main(argv: list[str]) -> int:
    return exit_code(lambda: plan(parse(argv)))
