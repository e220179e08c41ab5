"""The canonical sum over replicas beside gloo's all_reduce, on this machine's loopback or over limited links.

    bench/all_reduce.py --ranks 2 4 8 --bytes 64MiB     seconds of one sum.
    bench/all_reduce.py --rate 100MB                    between hosts, over links of that rate (root).
    bench/all_reduce.py --bits 1000                     random sums: how many differ from the left fold in one bit.

Ours and gloo's are measured in turn. The smallest of ``--runs`` is printed, because other processes only ever add time.
Each pair of hosts has a link of its own. So a rate limits the port of a host only if there are two ranks.
A random case draws the ranks and their order, shapes, dtypes, also that of additions, bucket size and algorithm. It also draws
how late each rank comes.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_hosts, run_on_ranks, timed
from _table import Row, parser, print_rows

from adaptra.collectives.rounds import ALGORITHMS
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.transports.process_groups import Members, end_group, new_group

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size_of(text: str) -> int:
    """Bytes of a text such as 64MiB."""
    return int(float(text[:-3]) * UNITS[text[-3:]])


def measure(rank: int, sizes: list[int], algorithms: list[str], runs: int) -> list[list[float]]:
    """Of each size: the smallest seconds of each algorithm, and of gloo."""
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    found: list[list[float]] = []
    for size in sizes:
        values = torch.randn(size // 4)
        sums = [GroupSum(group, algorithm=ALGORITHMS[name]) for name in algorithms]
        works: list[Any] = [lambda one=one, values=values: one.combine([values], mean=False) for one in sums]
        works.append(lambda values=values: dist.all_reduce(values, group=group))
        rounds: list[list[float]] = []
        for _ in range(runs + 1):
            for_each: list[float] = []
            for work in works:
                values.fill_(rank)  # sums of sums would overflow
                for_each.append(timed(work)[0])
            rounds.append(for_each)
        found.append([min(column) for column in zip(*rounds[1:], strict=True)])
    return found


def count_differences(rank: int, cases: int, ranks: int) -> int:
    """How many of some random cases have a bit other than the left fold on this rank or another."""
    draw, wrong = random.Random(0), 0
    names = {
        tuple(draw.sample(range(ranks), count)): f"group {index}" for index, count in enumerate([*range(2, ranks + 1)] * 2)
    }
    groups = {
        members: new_group(Members(name, members.index(rank), len(members)))
        for members, name in names.items()
        if rank in members
    }
    for case in range(cases):
        members = draw.choice(list(names))
        shapes = [tuple(draw.randint(0, 40) for _ in range(draw.randint(0, 3))) for _ in range(draw.randint(1, 4))]
        dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
        limit, algorithm = draw.choice((None, draw.randint(1000, 100_000))), draw.choice(list(ALGORITHMS.values()))
        added_in, mean = draw.choice((None, torch.float32)), draw.random() < 0.5
        late = [draw.choice((0.0, 0.0, 0.0, draw.random() * 0.005)) for _ in range(ranks)]
        if rank not in members:
            continue
        terms = [_terms(case, member, shapes, dtype) for member in members]
        mine = _terms(case, rank, shapes, dtype)
        time.sleep(late[rank])
        GroupSum(groups[members], algorithm=algorithm, limit=limit, dtype=added_in).combine(mine, mean=mean)
        least = torch.float32 if mean and dtype == torch.float16 else added_in
        wide = dtype if least is None else torch.promote_types(dtype, least)
        for index, one in enumerate(mine):
            total = terms[0][index].to(wide)
            for other in terms[1:]:
                total = total + other[index]
            total = (total / len(members) if mean else total).to(dtype)
            if not torch.equal(total.view(-1).view(torch.uint8), one.view(-1).view(torch.uint8)):
                wrong += 1
                break
    everywhere = torch.tensor(wrong)
    dist.all_reduce(everywhere)
    for group in groups.values():
        end_group(group)
    return int(everywhere)


def _terms(case: int, rank: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * case + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="replicas")
    arguments.add_argument("--bytes", nargs="+", default=["1MiB", "64MiB"], help="of one sum, such as 64MiB")
    arguments.add_argument("--algorithms", nargs="+", default=["direct"], choices=list(ALGORITHMS))
    arguments.add_argument("--rate", help="bytes per second of links between hosts, such as 100MB")
    arguments.add_argument("--runs", type=int, default=5, help="sums of each kind")
    arguments.add_argument("--bits", type=int, help="compare so many random sums instead")
    given = arguments.parse_args()
    if given.bits is not None:
        most = max(given.ranks)
        wrong = run_on_ranks(count_differences, most, given.bits, most)
        print_rows("Sums beside the left fold", [Row("sums that differ", wrong, 0, "", given.bits)], as_json=given.json)
        return
    sizes = [size_of(one) for one in given.bytes]
    rows: list[Row] = []
    for ranks in given.ranks:
        how = (sizes, given.algorithms, given.runs)
        if given.rate is None:
            found = run_on_ranks(measure, ranks, *how)
        else:
            found = run_on_hosts(measure, ranks, [f"all delay=0 rate={given.rate}"], *how)
        for text, (*ours, gloo) in zip(given.bytes, found, strict=True):
            rows += [
                Row(f"{ranks} ranks, {text}, {name}", seconds * 1e3, gloo * 1e3, "ms", given.runs)
                for name, seconds in zip(given.algorithms, ours, strict=True)
            ]
    print_rows("Sums over replicas beside gloo's all_reduce", rows, baseline="gloo", as_json=given.json)


if __name__ == "__main__":
    main()
