"""Print the tables of the study of learning-rate policies, from its frozen results.

    python -m benchmarks.studies.learning_rates.tables

LeNet-5 on the digits and on Fashion-MNIST, a ResNet-8 on CIFAR-10: a rate of its own for each
policy, found by a search on images held out, then five seeds. A policy counts if no seed diverged.
The runs are of the commits in learning_rates_cpu2_2026-11-23.json; `largebatch lab study lrbench`
repeats them.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.speed.measuring import frozen
from largebatch.report.seeds import interval

Policy = dict[str, Any]


def read() -> dict[str, dict[str, Any]]:
    """Return the configurations of the study: data set, batch and optimizer."""
    content: dict[str, dict[str, Any]] = frozen("learning_rates")
    return content


def whole(policies: dict[str, Policy]) -> dict[str, Policy]:
    """Return the policies without a diverged run."""
    return {
        name: policy
        for name, policy in policies.items()
        if all(run["diverged"] is None for run in policy["seeds"])
    }


def mean(policy: Policy) -> float:
    """Return the mean top-1 at the end in per cent."""
    return 100 * statistics.fmean(run["top1"] for run in policy["seeds"])


def summary(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each configuration: the constant rate, the best and the worst policy."""
    yield "| data, batch, optimizer | updates | a constant rate | best | worst |"
    yield "|---|---|---|---|---|"
    for name, configuration in found.items():
        policies = whole(configuration["policies"])
        means = {policy: mean(of) for policy, of in policies.items()}
        ends = (max(means, key=means.__getitem__), min(means, key=means.__getitem__))
        best, worst = (f"{end}, {means[end]:.2f}" for end in ends)
        updates = policies["fix"]["seeds"][0]["updates"]
        yield f"| {name} | {updates:,} | {means['fix']:.2f} | {best} | {worst} |"


def policies_of(name: str, configuration: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each policy: its rate, and its top-1 with Student's interval at 95 %."""
    yield f"| {name} | rate | top-1, % |"
    yield "|---|---|---|"
    for policy, of in whole(configuration["policies"]).items():
        top1 = interval(100 * run["top1"] for run in of["seeds"])
        yield f"| {policy} | {of['rate']:.3g} | {top1.with_ends('.2f')} |"
    yield ""


if __name__ == "__main__":
    every = read()
    print("\n".join(summary(every)), "", sep="\n")
    for one, policies in every.items():
        print("\n".join(policies_of(one, policies)))
