"""The command line of a pre-training run, the same for both domains: LightningCLI with a run folder around it."""

import logging
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import set_parsing_settings
from jsonargparse.typing import restricted_number_type
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pretrain.arguments import PLACE, OneLineParser, one_line, resumes_itself, with_config
from pretrain.callbacks import GateStatistics, StepProgress, StopSignal, find_callback
from pretrain.checkpoint import AtomicCheckpointIO, find_checkpoint, read_checkpoint
from pretrain.data import PretrainData
from pretrain.errors import NothingLeft, UserError
from pretrain.metrics import CsvLogger, EventsLogger, StepMetrics
from pretrain.module import PretrainModule
from pretrain.plan import apply_plan
from pretrain.policy import (
    add_policy_arguments,
    check_policy,
    checkpoints,
    ends_in_one_line,
    policy_callbacks,
    tied_to_launcher,
)
from pretrain.preflight import check_run
from pretrain.recovery import say, settle
from pretrain.run import METRICS, RunRecord, claimed, new_run_folder
from pretrain.size import check_size
from pretrain.watchdog import set_collective_timeout

# With which a model's configuration, Lightning's trainer and what a user's class_path names turn down their settings.
REFUSALS = (ValueError, TypeError, RuntimeError, ImportError)
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])  # NumPy takes no other
TRAINER_DEFAULTS = {
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,  # the run's own table of parameters says more
    "use_distributed_sampler": False,  # the loaders know their ranks
}


class PretrainCLI(LightningCLI):
    """Parse a run's configuration and build its parts; nothing is written yet."""

    def __init__(self, model_class: type, data_class: type, *, prog: str, description: str, args: list[str]) -> None:
        super().__init__(
            model_class,
            data_class,
            save_config_callback=None,
            trainer_defaults=dict(TRAINER_DEFAULTS),
            parser_class=OneLineParser,
            parser_kwargs={"prog": prog, "description": description, "allow_abbrev": False},
            args=args,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # --help shows the docstring below each field of a configuration class.
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        return super().init_parser(**kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything",
            type=Seed,
            default=0,
            help="Decides initial weights, order of the samples and noise. The same seed gives the same run.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--name", type=str, default=PLACE["name"], help="The run's name: it goes to runs_dir/name/TIME."
        )
        parser.add_argument("--runs_dir", type=str, default=PLACE["runs_dir"], help="Where the folders of runs lie.")
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            help="Folder of a run (or one of its checkpoints) to continue exactly, with its own configuration. "
            "auto: the newest intact checkpoint of the runs of this name, or a new run if there is none.",
        )
        parser.add_argument(
            "--init_from",
            type=str | None,
            default=None,
            help="Folder of a run, or a checkpoint, whose weights a new run starts from (nothing else is taken)."
            + self.model_class.foreign_help,  # type: ignore[union-attr]
        )
        add_policy_arguments(parser)
        for name, explanation in self.model_class.cli_links().items():  # type: ignore[union-attr]
            parser.add_argument(f"--{name}", type=float | None, default=None, help=explanation)
            parser.link_arguments(name, f"model.{name}")
        for name, target in self.model_class.data_links().items():  # type: ignore[union-attr]
            parser.link_arguments(f"model.{name}", f"data.{target}")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # LightningCLI warns of `args` beside a non-empty sys.argv, though here they are the same.
        self.config = parser.parse_args(args)

    def before_instantiate_classes(self) -> None:
        check_policy(self.config)
        check_folder_name(self.config.name)
        self.checkpoint = find_checkpoint(self.config.resume) if self.config.resume is not None else None
        self.folder = (
            self.checkpoint.parent.parent
            if self.checkpoint is not None
            else new_run_folder(self.config.runs_dir, self.config.name)
        )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (*REFUSALS, MisconfigurationException) as error:
            raise UserError(one_line(str(error))) from error
        self.model.run_config = yaml.safe_load(self.config_text())
        if self.checkpoint is None:
            self.model.init_from = self.config.init_from

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        chosen = self._get(self.config_init, "trainer")
        resumed_step = 0
        if self.checkpoint is not None:
            resumed_step = read_checkpoint(self.checkpoint, resumable=True, lazy=True)["global_step"]
        user = chosen.get("callbacks") or []
        user = user if isinstance(user, list) else [user]
        wants_bar = chosen.get("enable_progress_bar") is not False
        bars = [StepProgress()] if wants_bar and not any(isinstance(callback, ProgressBar) for callback in user) else []
        logger = chosen.get("logger")
        plugins = chosen.get("plugins") or []
        trainer = super().instantiate_trainer(
            plugins=[AtomicCheckpointIO(), *(plugins if isinstance(plugins, list) else [plugins])],
            callbacks=[*user, *bars, *self._callbacks()],
            logger=logger if logger is False else self._loggers(logger, resumed_step),
            **kwargs,
        )
        set_collective_timeout(trainer.strategy, self.config.hang_timeout_minutes)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False  # Lightning's own answer to SIGUSR1 saves elsewhere and requeues itself
        return trainer

    def _callbacks(self) -> list[Callback]:
        """The services of every run; the checkpoints come last, so that they hold what the others have done."""
        return [
            StepMetrics(),
            *policy_callbacks(self.folder, self.config),
            GateStatistics(),
            *self.model.callbacks(),
            RunRecord(self.folder, self.config_text()),
            StopSignal(),
            checkpoints(self.folder, self.config),
        ]

    def _loggers(self, chosen: Any, resumed_step: int) -> list[Logger]:
        csv = CsvLogger(self.folder / METRICS, resumed_step)
        if chosen is None or chosen is True:
            return [EventsLogger(self.folder, resumed_step), csv]
        return [*(chosen if isinstance(chosen, list) else [chosen]), csv]

    def config_text(self) -> str:
        """Return the complete configuration as YAML: running it again repeats the run."""
        config = self.config.clone()
        config.pop("config", None)
        config["resume"] = None
        return self.parser.dump(config, skip_none=False)


def check_folder_name(name: str) -> None:
    """Raise a UserError unless a run of this name has a folder of its own, directly in runs_dir."""
    is_one = name not in ("", "..") and Path(name).name == name and name.isprintable()
    if not is_one or len(name.encode()) > 255:
        raise UserError(f"name {name!r} has to be the name of one folder")


def config_folder() -> Path:
    """Return the folder of the shipped configurations: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


@dataclass
class FinishedRun:
    """What is left in memory after `fit`."""

    folder: Path
    module: PretrainModule
    data: PretrainData
    trainer: L.Trainer

    def print_report(self) -> None:
        """Say how it ended and where everything lies."""
        metrics = {k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("val/")}
        if metrics:
            print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        print(f"run folder  {self.folder}")
        print(f"look at it  tensorboard --logdir {self.folder}")


def fit(
    model_class: type,
    data_class: type,
    *,
    prog: str,
    description: str,
    demo_config: Path,
    args: list[str] | None = None,
) -> FinishedRun:
    """Parse, check everything, train; print where the run lies.

    Args:
        demo_config: used when the arguments name neither `--config` nor `--resume`.
        args: command-line arguments; default: those of the process.

    Raises:
        UserError: before anything is written, whatever is wrong with configuration, data or checkpoint.
    """
    quieten_libraries()
    given = sys.argv[1:] if args is None else args
    arguments = with_config(given, demo_config)
    cli = PretrainCLI(model_class, data_class, prog=prog, description=description, args=arguments)
    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    check_size(module, data, trainer)
    data.prepare_data()
    data.setup("fit")
    try:
        check_run(cli)
    except NothingLeft as end:
        if not resumes_itself(given):
            raise
        settle(cli.folder)  # a job that is started again after its end has nothing to do, and that is no mistake
        say(str(end))
        sys.exit(0)
    apply_plan(trainer, module.plan)
    with tied_to_launcher(trainer):
        _train(cli, prog)
    return FinishedRun(cli.folder, module, data, trainer)


def _train(cli: PretrainCLI, prog: str) -> None:
    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    stop = find_callback(trainer, StopSignal)
    with claimed(cli.folder, anew=cli.checkpoint is None) if trainer.is_global_zero else nullcontext():
        if trainer.is_global_zero:
            print(module.description(data), flush=True)
            print(f"run folder {cli.folder}", flush=True)
        try:
            with ends_in_one_line(cli.folder):
                trainer.fit(module, datamodule=data, ckpt_path=cli.checkpoint, weights_only=True)
        except MisconfigurationException as error:
            raise UserError(str(error)) from error
        except SystemExit:  # Lightning's answer to a second Ctrl-C
            sys.exit(stop.exit_code)
    if stop.requested:
        if trainer.is_global_zero:
            print(f"stopped at step {trainer.global_step}: go on with `{prog} --resume {cli.folder}`")
        sys.exit(stop.exit_code)


def quieten_libraries() -> None:
    """Keep what libraries say about themselves out of the output; warnings about the run stay."""
    for name, level in (("lightning", logging.WARNING), ("huggingface_hub", logging.ERROR)):
        for logger in (name, *(f"{name}.{part}" for part in ("pytorch", "fabric", "utils"))):
            logging.getLogger(logger).setLevel(level)
    for message in (
        ".*does not have many workers.*",
        ".*is smaller than the logging interval.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*available but not used.*",
        ".*Experiment logs directory .* exists.*",
        ".*treespec, LeafSpec.*",
        ".*all_gather is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message)
