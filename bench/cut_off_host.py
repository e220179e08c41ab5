"""What a pulled link costs: one host's links fall silent in a step of a job that survives, and come back.

They are silent for a second first, which costs nobody but that second. Two replicas of two stages train, each rank on a host of
its own. Packets vanish, as of a cable that is pulled: no connection breaks by itself. The others take the host for lost. Once
its links are back, its process is fenced. The hosts need root, see ``tests/links/``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _ranks import linked_hosts
from _table import Row, parser, print_rows

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from pulled_link import CUT_OFF, HOSTS, Trained, goes_on, trainings


def differing(ranks: tuple[Trained, ...], undisturbed: tuple[Trained, ...]) -> int:
    """How many of these ranks have other bits than in the undisturbed training."""
    return sum(one["digest"] != other["digest"] for one, other in zip(ranks, undisturbed, strict=False))


def main() -> int:
    """Run and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--silence", type=float, default=8.0, help="seconds after which the links are back")
    arguments.add_argument("--runs", type=int, default=3)
    given = arguments.parse_args()
    if (reason := linked_hosts.missing()) is not None:
        raise SystemExit(reason)
    epochs = different = 0
    redone: list[float] = []
    fenced: list[float] = []
    for _ in range(given.runs):
        with linked_hosts.LinkedHosts(HOSTS) as hosts:
            undisturbed, pulled = trainings(hosts, given.silence)
        left, cut_off = pulled[:CUT_OFF], pulled[CUT_OFF]
        *_, silent, back = left[0]["moments"]
        if not cut_off["error"].startswith("FencedError"):
            raise SystemExit(f"rank {CUT_OFF} was not fenced: {cut_off['error'] or 'no error'}")
        epochs += left[0]["epochs"]
        different += differing(left, undisturbed)
        redone.append(goes_on(left, silent) - silent)
        fenced.append(cut_off["ended"] - back)
        print(f"redone after {redone[-1]:.2f} s, fenced {fenced[-1]:.2f} s after the links are back", file=sys.stderr)
    rows = [
        Row("epochs that break, of two silences", epochs / given.runs, 1, "", given.runs),
        Row("ranks with other bits", different, 0, "", given.runs),
        Row("a pulled link: to the first op redone, longest", max(redone), 3.5, "s", given.runs),
        Row("links are back: until the fenced one has ended, longest", max(fenced), 1, "s", given.runs),
    ]
    print_rows(f"links of one of {HOSTS} hosts, silent for {given.silence:g} s", rows, baseline="bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
