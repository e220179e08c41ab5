"""Which mode is chosen in many settings, and what that costs over the best one, as real gradients have it.

Settings are slowness × jitter × exchange × noise. All modes train at half the rate that is best for exact, or each at its own
best one. The loss is what exact reaches so in 150 updates. Our choice is that of ``adaptra modes``, with the measured noise
scale and every mode allowed.
Modes that it names for a trial go on from one state, and so does the choice, for 40 of its updates. The
mode that is first at the loss at which the choice ends wins, if it takes 3 % less. What a trial itself takes is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import torch
from _mode_runs import Contender, Runs, Setting
from _table import Row
from _text_lanes import LaneOptimizer
from torch import Tensor

from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.choice import ModeChoice
from adaptra.planning.synchrony.modes import KINDS, Mode, Synchronous, XOrder
from adaptra.planning.synchrony.noise_scale import NoiseScale, NoiseScaleEstimator, TermNorms
from adaptra.planning.synchrony.star import StarRule, star_choice, star_groups

REPLICAS, BELOW, UPDATES, TRIAL, WARM, MARGIN = 8, 2, 150, 40, 30, 0.03
"""Replicas, and by how many rates of the grid exact's best one is higher. Updates of exact to the loss, of a trial, and before
it. By how much a trial must be shorter."""
SLOW = (("nothing slow", {}), ("1 of 8 at 2×", {0: 2.0}), ("4 of 8 at 3×", dict.fromkeys(range(4), 3.0)))
JITTER = (("", 0.0, 0.0), (", jitter", 0.3, 0.05))
LINKS = (("", 0.0), (", exchange of 10 steps", 10.0))
NOISE = (("", 8, 0.0), (", noisy", 1, 0.2))
"""Rows of a microbatch, and the share of rows with a random next byte."""


@dataclass(frozen=True)
class Outcome:
    """What a setting came to: seconds to the loss by mode, seed by seed, and who chose which mode.

    Attributes:
        name: The setting.
        seconds: By mode, one for each seed.
        chosen: By who chooses, the mode for each seed.
    """

    name: str
    seconds: dict[Mode, list[float]]
    chosen: dict[str, list[Mode]]

    @property
    def best(self) -> Mode:
        """The mode that takes least in the mean."""
        return min(self.seconds, key=lambda mode: fmean(self.seconds[mode]))

    def regret(self, who: str) -> float:
        """Return the seconds of the modes that someone chose over those of the best mode."""
        taken = fmean(self.seconds[mode][seed] for seed, mode in enumerate(self.chosen[who]))
        return taken / fmean(self.seconds[self.best])

    def to_exact(self, who: str) -> float:
        """Return the seconds of the modes that someone chose over those of exact."""
        taken = fmean(self.seconds[mode][seed] for seed, mode in enumerate(self.chosen[who]))
        return taken / fmean(self.seconds[Synchronous()])


def choice_rows(runs: Runs, staleness: int, *, at_own_rates: bool, is_quick: bool = False) -> Iterator[Row]:
    """Yield how much longer each one's choices take than the best modes, and how often exact is left where nothing is wrong."""
    outcomes: list[Outcome] = []
    for added, rows, drawn in NOISE:
        target, rate, phi = _yardstick(runs, rows, drawn, 0 if at_own_rates else BELOW)
        runs.grids.append(f"noise scale, {rows} rows{added}: {phi.value:.0f} samples, {phi.low:.0f} to {phi.high:.0f}")
        settings = [*product(SLOW, JITTER, LINKS)][: 2 if is_quick else None]
        for (slow, factors), (jitter, deviation, pauses), (link, exchange) in settings:
            case = SynchronyCase(REPLICAS, phi.value, factors, deviation, pauses, 8.0 * rows, 8, exchange=exchange, allow=KINDS)
            name = f"{slow}{jitter}{link}{added}"
            setting = Setting(name, case, rows, target, drawn, grid=() if at_own_rates else (rate,))
            outcomes.append(_outcome(runs, setting, staleness))
    for one in outcomes:
        runs.grids.append(
            f"{one.name}: seconds: {', '.join(f'{mode} {fmean(each):.4g}' for mode, each in one.seconds.items())}; chosen: "
            + "; ".join(f"{who}: {', '.join(map(str, dict.fromkeys(modes)))}" for who, modes in one.chosen.items())
        )
    yield from _rows_of(outcomes, runs.seeds)


def _rows_of(outcomes: list[Outcome], seeds: int) -> Iterator[Row]:
    count, means = len(outcomes), dict[str, float]()
    for who in outcomes[0].chosen:
        regrets = [one.regret(who) for one in outcomes]
        most_beyond, most = (0.1, 1.15) if who == "ours" else (None, None)
        missed = [regret for regret in regrets if not math.isfinite(regret)]
        beyond = sum(not regret <= 1.05 for regret in regrets) / count
        yield Row(f"choice: {who}: beyond 1.05 × best", beyond, most_beyond, "of settings", count)
        if missed:
            yield Row(f"choice: {who}: settings where the loss is not reached", len(missed), None, "settings", count)
        yield Row(f"choice: {who}: worst, ÷ best", max(set(regrets) - set(missed)), most, "", count)
        reached = [one.to_exact(who) for one in outcomes if math.isfinite(one.regret(who))]
        means[who] = fmean(reached)
        yield Row(f"choice: {who}: mean time to the loss ÷ exact's", means[who], None, "where it is reached", len(reached))
    star = min((who for who in means if who.startswith("STAR")), key=lambda who: means[who])
    yield Row(f"choice: ours ÷ {star}: mean times", means["ours"] / means[star], 1.0, "", count)
    healthy = [one for one in outcomes if one.name in ("nothing slow", "nothing slow, noisy")]
    left = sum(mode != Synchronous() for one in healthy for mode in one.chosen["ours"])
    yield Row("choice: nothing wrong: exact is left", left, 0, "choices", len(healthy) * seeds)


def _yardstick(runs: Runs, rows: int, drawn: float, below: int) -> tuple[float, float, NoiseScale]:
    """Return the loss that exact reaches, the rate at which it does so, and the noise scale on the way.

    The rate is so many ones of the grid below exact's best one.
    """
    whole = REPLICAS * 8
    plain = Setting("the rate of exact", SynchronyCase(REPLICAS, 1000, {}, microbatches=8), rows, 0.0, drawn, most=UPDATES)
    found = runs.times(plain, [Contender("exact", Synchronous())])
    (curves,) = found.curves.values()
    losses = [fmean(curve.loss_after(UPDATES * whole)[lane] for curve in curves) for lane in range(len(found.rates))]
    best = losses.index(min(loss for loss in losses if math.isfinite(loss)))
    taken = max(0, best - below)
    target, rate = losses[taken], found.rates[taken]
    return target, rate, _exact_steps(runs, plain, 0, rate, UPDATES)[1]


def _exact_steps(runs: Runs, setting: Setting, seed: int, rate: float, count: int) -> tuple[Tensor, NoiseScale]:
    """Take exact steps one by one. Returns the parameters, and the noise scale from the terms of replicas."""
    task, each, replicas = runs.task(setting.rows, setting.noise), setting.case.microbatches, setting.case.replicas
    parameters = task.start([seed])
    optimizer = LaneOptimizer(torch.tensor(rate))
    estimator = NoiseScaleEstimator(float(each * setting.rows), replicas)
    for step in range(count):
        numbers = torch.arange(step * each, step * each + each) * replicas
        batches = [task.batch(seed, numbers + replica) for replica in range(replicas)]
        inputs, targets = torch.stack([one for one, _ in batches]), torch.stack([one for _, one in batches])
        terms = task.gradient(parameters.expand(replicas, -1), inputs, targets) / targets.shape[1]
        mean = terms.mean(0)
        estimator.add(TermNorms(tuple(map(float, terms.square().sum(1))), float(mean @ mean)))
        parameters = optimizer.change(parameters, mean)
    estimate = estimator.estimate
    assert estimate is not None
    return parameters, estimate


def _outcome(runs: Runs, setting: Setting, staleness: int) -> Outcome:
    """Train a setting in all modes, and let everyone choose."""
    case = setting.case
    star = _star_modes(case, staleness)
    modes = dict.fromkeys([*(_limited(mode, staleness) for mode in case.all_modes), *star.values()])
    found = runs.times(setting, [Contender(str(mode), mode) for mode in modes])
    rates = {one.mode: rate for one, rate in found.best_rates().items()}
    seconds = {one.mode: found.at(one, rates[one.mode]) for one in found.curves}
    ours = [_limited(_chosen(runs, setting, seed, rates, staleness), staleness) for seed in range(runs.seeds)]
    asynchronous = _limited(XOrder(x=1), staleness)
    seeds = runs.seeds
    chosen: dict[str, list[Mode]] = {"ours": ours, "always exact": [Synchronous()] * seeds}
    chosen["always asynchronous"] = [asynchronous] * seeds
    return Outcome(setting.name, seconds, chosen | {who: [mode] * seeds for who, mode in star.items()})


def _limited(mode: Mode, staleness: int) -> Mode:
    return replace(mode, staleness=staleness) if isinstance(mode, XOrder) and mode.x != REPLICAS else mode


def _star_modes(case: SynchronyCase, staleness: int) -> dict[str, Mode]:
    """Return the mode that each of STAR's rules picks: the first falling x, or groups by speed if these cost less."""
    times = [case.seconds * factor for factor in case.factors]
    picked: dict[str, Mode] = {}
    for rule in (StarRule.FASTEST, StarRule.INTERPOLATED, StarRule.EVENTS):
        choice = star_choice(rule, times, case.phi, case.batch)
        sizes, cost = star_groups(times, case.phi, case.batch, case.seconds / 6)
        grouped = len(sizes) > 1 and cost < choice.of_all(choice.first)
        mode = XOrder(groups="auto") if grouped else XOrder(x=choice.first)
        picked[f"STAR, {rule.value}"] = _limited(mode, staleness)
    return picked


def _chosen(runs: Runs, setting: Setting, seed: int, rates: Mapping[Mode, float], staleness: int) -> Mode:
    """Return our choice, by a trial where it is worth one. Each mode has its rate."""
    choice = ModeChoice(setting.case, seed)
    mode = choice.chosen.mode
    rivals = [price for price in choice.trials if price.mode != mode]
    if not rivals:
        return mode
    parameters, _ = _exact_steps(runs, setting, seed, rates[Synchronous()], WARM)
    best, least = mode, (1 - MARGIN) * TRIAL * choice.chosen.pace.seconds
    trial = replace(setting, name="trial", start=parameters, most=TRIAL, target=0.0)
    of_choice, _ = runs.train(trial, Contender("", mode), seed, choice.times, (rates[mode],))
    goal = of_choice.loss_after(TRIAL * setting.whole)[0]
    for price in rivals:
        count = TRIAL * choice.chosen.pace.seconds / price.pace.seconds * price.pace.samples / setting.case.batch / REPLICAS
        rival = replace(trial, most=math.ceil(1.1 * count))
        limited = _limited(price.mode, staleness)
        curve, _ = runs.train(rival, Contender("", limited), seed, choice.times, (rates[limited],))
        # Seconds by the usual ones of an update: those of so few are chance.
        moment = curve.updates_to(goal)[0] * price.pace.seconds
        if moment < least:
            best, least = price.mode, moment
    return best
