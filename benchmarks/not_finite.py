"""What looking for losses and gradients that are not finite costs `hetero_ddp`, against `on_nan="ignore"`.

Wall seconds per step, and CPU seconds (all threads of all ranks), as ratios of alternating runs.

    python benchmarks/not_finite.py [--repeats 7] [--ranks 2]
"""

from typing import Any

import jobs
import overhead

MODES = ("ignore", "error", "skip")


def worker(repeats: int) -> dict[str, Any]:
    from lightning_hetero import HeteroDDPStrategy

    def fit(mode: Any, model: str) -> tuple[float, float]:
        return overhead.fit(HeteroDDPStrategy(on_nan=mode, balance="off"), model)

    return {
        model: jobs.alternate(repeats, {mode: lambda o=mode, m=model: fit(o, m) for mode in MODES})
        for model in overhead.MODELS
    }


def main() -> None:
    options = jobs.options(__doc__, 7, ranks=2)
    results = jobs.launch(options.ranks, options.repeats)
    print(f"\n{options.repeats} alternating runs on {options.ranks} ranks; {jobs.machine()}")
    print("against on_nan='ignore', median and range of the runs' ratios:")
    for model, runs in results.items():
        print(f"  {model}")
        for mode in MODES[1:]:
            pairs = list(zip(runs[mode], runs["ignore"], strict=True))
            print(f"    {mode:5}  wall time per step  {jobs.spread([a[0] / b[0] for a, b in pairs])}")
            print(f"           CPU time per step   {jobs.spread([a[1] / b[1] for a, b in pairs])}")


if __name__ == "__main__":
    jobs.start(main, worker)
