"""Plans the fastest lossless decoding: which models draft for the verifier, and how many tokens.

    python scripts/plan.py --config=demo --check --output plan.py
    python scripts/plan.py --config=demo --models SMALL MIDDLE LARGE
    python scripts/decode.py --config=plan.py

The command times every model's calls and measures, on texts written by the largest model, how often each
model accepts another's tokens. With --acceptance-to, it writes these acceptances to a file, which suffices to
plan for TPUs elsewhere:

    python scripts/plan.py --config=demo --acceptance-to demo.json
    python scripts/plan.py --config=demo --tpu=v5e:2x2 \\
        --acceptance-from demo.json --requests-per-second 500

With --cluster and --tensor-parallel, it plans for models that the devices of several processes share.
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
from speccascade_jax.cluster import Job, joined
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
from speccascade_jax.config import DecodeConfig, dtype_of
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
from speccascade_jax.parallel import decoding_mesh
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
STEP = "one verifier token"
CHOSEN, PAIR, ALONE = "the plan", "best pair", "verifier alone"  # the names of compared decodings
TRIALS = 3  # the number of times that each text is decoded to compare plans
BLOCKS = ("block_size", "max_block_size", "stop_below", "hand_over")  # the fields of a planned config
Runs = dict[str, tuple[PlannedHierarchy, Settings]]
"""Chains of models and their settings, by name."""
STOPS = (0.25, 0.12, 0.06)  # the values of stop_below that are compared with fixed blocks


@dataclasses.dataclass(frozen=True)
class Arguments:
    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A config name or path. Its fields are the defaults of the other flags. All its models are candidates;
    the last one is the verifier, whose distribution the output follows."""
    input: str | None = None
    """Texts to plan for (a file as for the decode command). Default: the validation split of the config's
    task, or else the config's examples."""
    limit: int = 64
    """The number of texts to use."""
    max_block: int = 15
    """The largest block size to consider. A block drafter is never asked for more tokens than it writes in
    one pass."""
    most_models: int | None = None
    """The largest number of models in a plan. Default: no limit."""
    repetitions: int = 9
    """The number of times that each call is timed."""
    check: bool = False
    """Decode with the plan, with the best pair (also with adaptive blocks) and with the verifier alone, and
    print their times."""
    output: str | None = None
    """The config file to write for the plan. It has adaptive blocks if --check finds them significantly
    faster."""
    acceptance_to: str | None = None
    """A JSON file to write the measured acceptances to; pass it to --acceptance-from."""
    acceptance_from: str | None = None
    """With --tpu: the file that --acceptance-to wrote for these models, on any machine."""
    tpu: str | None = None
    """Plan for these chips, for example v5e:2x4. Times are lower bounds from the TPU compiler and the chips'
    published figures. This needs no TPU and reads no weights; --tensor-parallel chips share each model."""
    requests_per_second: float | None = None
    """With --tpu: simulate servers under this load, and print the number of chips that it needs."""
    tokens: int | None = None
    """With --requests-per-second: the mean number of tokens per answer. Default: that of the measured
    texts."""
    first_token_ms: float = 1000.0
    """With --requests-per-second: the time in milliseconds within which 99% of requests must have their first
    token."""
    cluster: str | None = None
    """Plan for the devices of several processes: `auto` on TPU pods and Slurm, otherwise
    HOST:PORT,PROCESSES,NUMBER in each process. The first process reads, decides, writes and prints."""

    @property
    def demand(self) -> Demand | None:
        """The load on servers, if there is one to simulate."""
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
            f"config {arguments.config} has no examples, and the texts of its task were not found",
        )
    return list(run.examples[:limit])


def checked_inputs(arguments: Arguments) -> list[str]:
    """The texts to plan for. Raises ValueError if they, or the output files, cannot be used."""
    check_files(arguments)
    texts = [text for text in read_inputs(arguments) if text.strip()]
    if not texts:
        raise FieldError("input", arguments.input, "give texts to plan for.", "all inputs are blank")
    return texts


def check(arguments: Arguments) -> None:
    """Raises ValueError for flags that cannot be planned with, before files are looked at."""
    a, run = arguments, arguments.run
    run.check()
    at_least(1, limit=a.limit, max_block=a.max_block, most_models=a.most_models, repetitions=a.repetitions)
    at_most(max(WIDTHS) - 1, max_block=a.max_block)
    if not run.lossless:
        raise FieldError("method", run.name, "give --method speculative: plans are for lossless decoding.")
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
            "time this pair with scripts/benchmark.py.",
            f"a plan needs every drafter's distribution, which {model_free.name} does not have",
        )
    check_chips(a)


def check_files(a: Arguments) -> None:
    """Raises FieldError if an output file cannot be written, or would replace another file."""
    if a.output is not None:
        path = Path(a.output)
        if path.suffix != ".py":
            raise FieldError(
                "output", str(path), "a config file's name must end in .py.", f"--output is {path}"
            )
        if path.is_file() and not path.read_bytes().startswith(f"# {PLANNED}".encode()):
            raise FieldError(
                "output",
                str(path),
                "delete it or choose another name.",
                f"--output is {path}, which plan.py did not write",
            )
    written = {"--output": a.output, "--acceptance-to": a.acceptance_to}
    check_targets(written, {"--config": configs.path_of(a.config), **a.run.files})


def check_chips(a: Arguments) -> None:
    """Raises FieldError for flags of plans for TPUs that exclude or need each other."""
    if a.tpu is None:
        for name in ("acceptance_from", "requests_per_second"):
            if getattr(a, name) is not None:
                raise FieldError(name, getattr(a, name), "give --tpu, too.", f"{flag_of(name)} needs --tpu")
    else:
        if a.cluster is not None:
            raise FieldError(
                "cluster",
                a.cluster,
                "leave out one of the two.",
                "--tpu runs no model, and --cluster runs all of them on several processes",
            )
        tpus.checked(a.tpu)
        if a.acceptance_from is None:
            raise FieldError(
                "acceptance_from",
                None,
                "give a file that --acceptance-to wrote.",
                "--tpu runs no model, so it cannot measure how often drafts are accepted",
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
    """Raises FieldError for a drafter that reads its verifier's states if it is combined with other models,
    or if its acceptances are to be written for other machines."""
    networks = [network_of(model) for model in cascade.models]
    reads = [not getattr(network, "by_prefix", True) for network in networks[:-1]]
    if not any(reads):
        return
    if len(names) > 2 or networks[0] != networks[1]:
        drafter = names[reads.index(True)]
        raise FieldError(
            "models",
            list(names),
            f"give only {drafter} and its verifier.",
            f"{drafter} reads the states of its own verifier",
        )
    if arguments.acceptance_to is not None:
        raise FieldError(
            "acceptance_to",
            arguments.acceptance_to,
            "leave it out.",
            f"{names[0]} reads its verifier's states; --tpu can only plan with independent models",
        )


def measured(
    job: Job,
    arguments: Arguments,
    cascade: Cascade,
    names: tuple[str, ...],
    texts: list[str],
    screen: Console,
) -> tuple[Candidates, Contestant]:
    """The candidates, with their costs on this machine and their acceptances on `texts`; and a function that
    measures the machine's pace later: the verifier's time for a call of one token. Each process of a job has
    its own measurements of what all of them do together."""
    settings = arguments.run.settings
    alone = dataclasses.replace(settings.by("verifier"), alpha=0.0, block_size=1)
    outputs = list(
        track(
            cascade.generate(texts, alone, truncate=True, batch_size=8),
            "the verifier's texts",
            len(texts),
            console=screen,
        )
    )
    read = reading(cascade, outputs, settings, arguments.max_block)
    if arguments.acceptance_to is not None and job.first:
        read.save(arguments.acceptance_to, names, settings)
    rows = cascade.encode(texts, truncate=True)[0]
    widest = arguments.max_block + 1
    widths = sorted({width for width in WIDTHS if width < widest} | {widest})

    def shown(work: Iterable[Any], name: str) -> Iterable[Any]:
        return track(work, name, console=screen)

    width = cascade.bucket(int(np.median(list(map(len, rows)))))
    seconds, besides = call_seconds(
        cascade,
        widths,
        settings,
        source_length=width,
        repetitions=arguments.repetitions,
        track=shown,
        job=job,
    )
    watch = step_watch(cascade, settings, width, job)

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
    """The machine's pace and the fixed cost of a text.

    The fixed cost is in seconds: the verifier's, and the additional cost of each drafter. It is a text's time
    minus the time of its counted calls: reading the source, entering from Python, and the first rounds of a
    text, which are slower than those that are timed for long.

    The pace is the time of a `step` (one verifier token) during this measurement, relative to its time in
    `seconds`. All calls are corrected by it.
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
    table = whole_words("tokens read", *names, title="ms per call, and fixed cost of a text in ms")
    for tokens in (n for n in WIDTHS if n < calls.shape[1]):
        table.add_row(str(tokens), *(f"{1e3 * seconds:.2f}" for seconds in calls[:, tokens]))
    table.add_row("fixed, per text", *(f"{1e3 * once:.2f}" for once in candidates.text_seconds))
    screen.print(table)
    show_pairs(
        "ms per round besides its calls", "drafts of", "read by", names, 1e3 * candidates.besides, 2, screen
    )
    show_pairs("acceptance", "tokens of", "accepted by", names, candidates.acceptance, 3, screen)
    for j, i, k, excess in triangle_violations(candidates.acceptance):
        screen.print(
            f"the acceptances of {names[j]}, {names[i]} and {names[k]} violate the triangle "
            f"inequality by {excess:.3f}: use more texts (--limit)."
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
    """The settings of a cascade with these block sizes, or of the verifier alone without any."""
    if not block_sizes:
        return dataclasses.replace(settings.by("verifier"), alpha=0.0, block_size=1)
    return dataclasses.replace(settings, method="speculative", alpha=0.0, block_size=block_sizes)


def of_models(cascade: Cascade, names: tuple[str, ...], models: Sequence[str]) -> Cascade:
    """A cascade with only the given ones of its models."""
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
    """The seconds per text, as medians of TRIALS, and the outputs of each contestant."""
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
    """The models and settings of each plan."""
    return {
        name: (plan, dataclasses.replace(settings_of(plan.block_sizes, settings), hand_over=plan.hand_over))
        for name, plan in plans.items()
    }


def adaptive_runs(pair: PlannedHierarchy, settings: Settings, max_block: int) -> Runs:
    """The pair with adaptive blocks of at most `max_block` tokens."""
    lossless = dataclasses.replace(
        settings, method="speculative", alpha=0.0, block_size="adaptive", max_block_size=max_block
    )
    return {f"adaptive, {stop:g}": (pair, dataclasses.replace(lossless, stop_below=stop)) for stop in STOPS}


def sampler_runs(run: DecodeConfig, target: PlannedHierarchy, names: tuple[str, ...]) -> Runs:
    """A config's samplers and lossless rules, over all the models. They are timed next to the plans, but not
    predicted."""
    whole = dataclasses.replace(target, models=names, block_sizes=())
    return {
        name: (whole, run.settings.by(entry))
        for name, entry in named(run.samplers).items()
        if isinstance(entry, Scheme) or entry.lossless
    }


class Measured(NamedTuple):
    """The measured times of a run."""

    seconds: Float[np.ndarray, " texts"]
    per_token: float
    speedup: tuple[float, float]  # over the verifier: quartiles over texts


def measured_times(
    runs: Runs, cascade: Cascade, names: tuple[str, ...], texts: list[str], step: Contestant, screen: Console
) -> tuple[float, dict[str, Measured]]:
    """The seconds of a `step` during the measurement, and the times of each run."""
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
    """Prints measured and predicted times.

    `pace` is the time of a call while `times` were measured, relative to its time during planning.
    Predictions are scaled by it, so that remaining differences are not due to the machine's load. Only
    `plans` are predicted, not adaptive blocks and a config's samplers.
    """
    table = whole_words(
        "plan",
        "models",
        "block\nsizes",
        *(("measured", "speedup,\nquartiles") if times else ()),
        "predicted,\nspeedup",
        title="ms per token, and speedup over the verifier alone",
    )
    whole = runs[ALONE][0].seconds_per_token
    for name, (plan, settings) in runs.items():
        sizes = f"up to {settings.max_block_size}" if settings.adaptive else "-"
        measured, predicted = list[str](), "-"
        if name in plans:
            sizes = "\n".join(map(str, plan.block_sizes)) or "-"
            milliseconds = 1e3 * pace * plan.seconds_per_token
            predicted = f"{milliseconds:.3f}\n{whole / plan.seconds_per_token:.2f}"
        if times:
            seconds, (low, high) = times[name].per_token, times[name].speedup
            measured = [
                f"{1e3 * seconds:.3f}",
                f"{times[ALONE].per_token / seconds:.2f}\n{low:.2f} to {high:.2f}",
            ]
        table.add_row(name, "\n".join(plan.models), sizes, *measured, predicted)
    screen.print(table)
    if times:
        screen.print(
            f"During the comparison {STEP} took {pace:.2f} times as long as during planning; the predictions "
            "are scaled accordingly.",
            soft_wrap=True,
        )


def of_lookahead(candidates: Candidates, plan: PlannedHierarchy) -> dict[str, float]:
    """The knobs of the method lookahead for a pair: its acceptance, which depends on how drafts are verified,
    and the time of a round in verifier steps."""
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
    """Describes a plan: its models and its blocks."""
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
    """Writes a config file that loads `config` with the plan's models and with `changes`."""
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
    """The name of the run to write a config for: the plan, or the fastest adaptive blocks that are
    significantly faster than the plan and the best pair (95%, paired over texts)."""

    def surely(name: str) -> bool:
        drawn = resamples(len(times[name].seconds))
        rival, *planned = (times[run].seconds[drawn].sum(axis=1) for run in (name, CHOSEN, PAIR))
        return all(interval(other / rival)[0] > 1 for other in planned)

    rivals = [name for name, (_, settings) in runs.items() if settings.adaptive and surely(name)]
    return min(rivals, key=lambda name: times[name].per_token, default=CHOSEN)


def chosen_plans(candidates: Candidates, arguments: Arguments) -> dict[str, PlannedHierarchy]:
    """The fastest plan, the best pair and the verifier alone, by their names in the comparison."""
    run, max_block = arguments.run, arguments.max_block
    plans = {CHOSEN: best(candidates, max_block, run.hand_over, arguments.most_models)}
    if len(candidates.names) > 1:
        pair = best(candidates, max_block, run.hand_over, 2)
        plans[PAIR] = pair if len(pair.models) == 2 else _any_pair(candidates, max_block)
    plans[ALONE] = predict(candidates, candidates.names[-1:], (), run.hand_over)
    return plans


def agreed_plans(job: Job, candidates: Candidates, arguments: Arguments) -> dict[str, PlannedHierarchy]:
    """The plans that the first process chooses by its measurements, in all processes of a job: by its own,
    each might choose another one."""

    def chains() -> dict[str, Any]:
        plans = chosen_plans(candidates, arguments)
        return {name: [plan.models, plan.block_sizes] for name, plan in plans.items()}

    return {
        name: predict(candidates, tuple(models), tuple(block_sizes), arguments.run.hand_over)
        for name, (models, block_sizes) in job.share(chains).items()
    }


def plan(arguments: Arguments) -> None:
    check(arguments)
    if arguments.tpu is not None:
        check_files(arguments)
        plan_for(arguments, arguments.tpu)
        return
    with joined(arguments.cluster) as job:
        plan_with(job, arguments)


def steps_of(arguments: Arguments) -> dict[str, Any]:
    """The settings that determine what all processes of a job run together."""
    names = ("max_block", "repetitions", "check")
    return arguments.run.record("missing", "examples") | {name: getattr(arguments, name) for name in names}


def plan_with(job: Job, arguments: Arguments) -> None:
    """Measures on the devices of all processes of a job; the first process decides, prints and writes."""
    run, screen = arguments.run, console(quiet=not job.first)
    job.agree(steps_of(arguments) | {"dtype": dtype_of(run)})
    mesh = decoding_mesh(run.tensor_parallel, batched=False)  # texts are timed one at a time
    texts = job.share(partial(checked_inputs, arguments))
    cascade = Cascade.from_config(run, mesh)
    paths = short_names([path for _, path in run.roles])
    names = tuple(paths)
    check_members(arguments, cascade, names)
    longest = getattr(cascade.drafter, "drafts_at_once", None) or arguments.max_block
    arguments = dataclasses.replace(arguments, max_block=min(arguments.max_block, longest))
    candidates, step = measured(job, arguments, cascade, names, texts, screen)
    show_candidates(candidates, screen)
    plans = agreed_plans(job, candidates, arguments)
    runs = runs_of(plans, run.settings)
    now, times = candidates.call_seconds[-1, 1], dict[str, Measured]()
    if arguments.check:
        if PAIR in plans:
            runs |= adaptive_runs(plans[PAIR], run.settings, arguments.max_block)
        runs |= sampler_runs(run, plans[ALONE], names)
        now, times = measured_times(runs, cascade, names, texts, step, screen)
    if not job.first:
        return
    show_runs(runs, plans, now / candidates.call_seconds[-1, 1], times, screen)
    if len(plans[CHOSEN].models) == 1:
        screen.print("No drafter pays off on this machine: the verifier alone is predicted to be fastest.")
    if arguments.output is not None:
        write_fastest(arguments.output, arguments, runs, times, candidates, paths, screen)


def write_fastest(
    path: str,
    arguments: Arguments,
    runs: Runs,
    times: dict[str, Measured],
    candidates: Candidates,
    paths: dict[str, str],
    screen: Console,
) -> None:
    """Writes a config file for the fastest run. `paths` are the models', by their short names."""
    name = fastest(runs, times)
    chosen, settings = runs[name]
    time = (
        f"{1e3 * times[name].per_token:.3f} ms per token measured"
        if times
        else f"{1e3 * chosen.seconds_per_token:.3f} ms per token predicted"
    )
    write_config(
        path,
        arguments,
        chosen,
        paths,
        f"{told(chosen, settings)}; {time}",
        {field: getattr(settings, field) for field in BLOCKS} | of_lookahead(candidates, chosen),
    )
    screen.print(
        f"written: {path} ({told(chosen, settings)}); decode with --config={path}",
        soft_wrap=True,
    )


def plan_for(arguments: Arguments, topology: str) -> None:
    """Plans for TPUs that are not attached to this machine."""
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
    """The best pair, for the case that the verifier alone is faster."""
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
    """The paths by short names: their last parts without a common ending (as in runs/NAME/export), or the
    whole paths if those are not unique."""
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
