"""Train a masked autoencoder: `python -m vision_mae.fit [--config FILE] [--KEY VALUE ..]`; by default a demo."""

from pretrain.callbacks import find_callback
from pretrain.cli import FinishedRun, config_folder, fit
from pretrain.errors import command
from vision_mae.callbacks import KnnProbe
from vision_mae.data.module import ImageData
from vision_mae.module import MaskedAutoencoderModule

MODULE_CLASS, DATA_CLASS = MaskedAutoencoderModule, ImageData
PROG = "python -m vision_mae.fit"
DESCRIPTION = (
    "Pre-train a masked autoencoder with any feed-forward kind of moa. Without --config: a demo of a few minutes."
)


def run(args: list[str] | None = None) -> FinishedRun:
    """Train as the arguments say (default: those of the process) and report."""
    finished = fit(
        MODULE_CLASS,
        DATA_CLASS,
        prog=PROG,
        description=DESCRIPTION,
        demo_config=config_folder() / "mae_tiny.yaml",
        args=args,
    )
    if finished.trainer.is_global_zero:
        found = find_callback(finished.trainer, KnnProbe).latest
        if found:
            print("  ".join(f"{name} {value:.4f}" for name, value in found.items()))
        finished.print_report()
    return finished


@command
def main(args: list[str] | None = None) -> None:
    run(args)


if __name__ == "__main__":
    main()
