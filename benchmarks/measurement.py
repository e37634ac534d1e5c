"""How the benchmarks measure: all contenders in one run, and ratios inside a round."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

__all__ = ["interleaved", "print_table"]


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every contender in every round; each runs once a round, so a busy machine slows all alike."""
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for count in range(rounds + warm_up):
        order = list(contenders.items())
        shuffle(order)  # what a contender leaves in caches and allocator is then nobody's lot in particular
        for name, run in order:
            start = clock()
            run()
            if count >= warm_up:
                times[name].append(clock() - start)
    return times


def print_table(title: str, times: Mapping[str, Sequence[float]], memory: Mapping[str, int] | None = None) -> None:
    """Median ratios to the first contender with quartiles, and what each keeps for backward."""
    base = next(iter(times))
    print(f"\n{title}")
    print(f"{'':34}{'ms':>8}{'ratio':>8}{'quartiles':>15}" + (f"{'saved MB':>10}{'ratio':>7}" if memory else ""))
    for name in times:
        low, middle, high = statistics.quantiles([t / b for t, b in zip(times[name], times[base], strict=True)], n=4)
        line = f"{name:34}{statistics.median(times[name]) * 1e3:8.1f}{middle:8.2f}{f'{low:.2f}-{high:.2f}':>15}"
        print(line + (f"{memory[name] / 1e6:10.1f}{memory[name] / memory[base]:7.2f}" if memory else ""), flush=True)
