"""Train the tiny models under random kills, on one process and on two (DDP, FSDP2), with NaN batches among the good.

Each campaign trains one of them twice: undisturbed, and disturbed, where every life of the run is killed (SIGKILL or
SIGTERM, of one rank or all) at a random moment and the next one is started with the very same command, but for the
number of processes and the strategy. At the end both have to have the same losses, and nothing may be left: no process,
no unfinished file, no growth of memory. Linux only.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tqdm.auto import tqdm

from pretrain.run import versions
from tests.soak.campaign import CAMPAIGNS, Outcome, run_campaign


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="kill for so long (default 30), then let it end")
    parser.add_argument("--seed", type=int, default=0, help="of times, signals and targets (default 0)")
    parser.add_argument("--output", type=Path, help="where the result goes as JSON (default: shown alone)")
    parser.add_argument("--keep", type=Path, help="a folder for the runs and their logs (default: temporary)")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    chosen = parse(args)
    chance, until = random.Random(chosen.seed), time.monotonic() + 60 * chosen.minutes
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="soak") as temporary, tqdm(unit="life", desc="soak") as bar:
        root = chosen.keep or Path(temporary)
        while time.monotonic() < until:
            number = len(outcomes)
            campaign = CAMPAIGNS[number % len(CAMPAIGNS)]
            outcome = run_campaign(campaign, root / f"{number:02d}_{campaign.name}", chance, until, bar)
            outcomes.append(outcome)
            bar.write(outcome.line())
        records = [outcome.record() for outcome in outcomes]  # from files in the folder, which may be temporary
        faults = [fault for outcome in outcomes for fault in outcome.faults()]
    result = {"seed": chosen.seed, "minutes": chosen.minutes, "versions": versions()}
    result |= {"campaigns": records}
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    lives = sum(len(outcome.lives) for outcome in outcomes)
    print(f"{len(outcomes)} campaigns, {lives} lives: {'; '.join(faults) or 'every loss as undisturbed, nothing left'}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
