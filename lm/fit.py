"""Train a language model: `python -m lm.fit [--config FILE] [--KEY VALUE ..]`; without arguments, the demo."""

from lm.callbacks import TextSamples
from lm.data.module import TextData
from lm.module import LanguageModule
from pretrain.callbacks import find_callback
from pretrain.cli import FinishedRun, config_folder, fit
from pretrain.errors import command

MODULE_CLASS, DATA_CLASS = LanguageModule, TextData
PROG = "python -m lm.fit"
GENERATE = "python -m lm.generate"
DESCRIPTION = "Pre-train a Llama with any feed-forward kind of moa. Without --config: a demo of a few minutes."


def run(args: list[str] | None = None) -> FinishedRun:
    """Train as the arguments say (default: those of the process) and report."""
    finished = fit(
        MODULE_CLASS,
        DATA_CLASS,
        prog=PROG,
        description=DESCRIPTION,
        demo_config=config_folder() / "lm_tiny.yaml",
        args=args,
    )
    if finished.trainer.is_global_zero:
        samples = find_callback(finished.trainer, TextSamples)
        if samples.latest:
            print(f"\nsample (after ⟶ the model's own words):\n{samples.latest}\n")
        finished.print_report()
        print(f"let it write {GENERATE} --checkpoint {finished.folder} --prompt 'My fellow Americans'")
    return finished


@command
def main(args: list[str] | None = None) -> None:
    run(args)


if __name__ == "__main__":
    main()
