"""What the command line says: which configuration it implies, and how its mistakes are told."""

import difflib
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from pretrain.errors import EXIT_CODE, UserError, print_error
from pretrain.recovery import intact_checkpoint, newest_intact, say
from pretrain.run import CONFIG
from pretrain.yaml_file import check_yaml, scalars

MAX_PATH = 4096  # characters; a longer value names no file

AUTO = "auto"  # --resume: whatever there is
PLACE = {"runs_dir": "runs", "name": "run"}  # the settings that say where a run lies, and their defaults


def one_line(message: str) -> str:
    """Return a message of the parser in one line; of a value that fits none of many types, what was expected."""
    text = " ".join(message.split())
    if own := re.search(r"Errors: - (?!Expected)(.+?) - Expected ", text):  # a configuration's own words say it best
        return own[1]
    text = re.sub(r"Does not validate against any of the Union subtypes Subtypes: .*? Errors: ", "", text)
    text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", text).replace("NoneType", "null")
    text = re.sub(r" Given value type: \w+ Given value:", "; it is", text)
    parts = dict.fromkeys(text.split(" - Expected "))  # what several types end in is named once
    return " - Expected ".join(parts)


class OneLineParser(LightningArgumentParser):
    """A parser whose errors are one line: what is wrong, and the nearest valid key."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = one_line(message)
        print_error(f"{text}{self._suggestion(text)} (--help lists all keys)")
        sys.exit(EXIT_CODE)

    def parse_args(self, args: Any = None, *others: Any, **settings: Any) -> Any:
        """Parse; but what the parser would read, because a value names it, has to be a file, and of a sensible size."""
        words = list(sys.argv[1:] if args is None else args)
        for word, following in pairwise([*words, ""]):
            if word.startswith("-"):
                option, given, value = word.partition("=")
                value = value if given else following
                is_config = option in ("-c", "--config")
                for key, text in scalars(Path(value)) if is_config else [(option.removeprefix("--"), value)]:
                    self._check_file(key, text)
        return super().parse_args(words, *others, **settings)

    def _check_file(self, key: str, value: str) -> None:
        """Raise a UserError for the name of a pipe or a device, and of a file too large to hold settings."""
        path = Path(value)
        if len(value) > MAX_PATH or "\n" in value or "\0" in value or not os.path.lexists(value) or path.is_dir():
            return
        if not path.is_file():
            raise UserError(f"{key} is {value}, a pipe or a device (or a link to nothing): give a file or a folder")
        # Instead of settings, the parser takes the name of a file that holds them.
        if key.startswith("trainer.") or any(action.dest.startswith(f"{key}.") for action in self._actions):
            check_yaml(path)

    def _suggestion(self, message: str) -> str:
        keys = [action.dest for action in self._actions]
        for word in message.replace('"', " ").replace("'", " ").replace("=", " ").split():
            key = word.strip(".,:").removeprefix("--")
            if "." in key and key not in keys and (near := difflib.get_close_matches(key, keys, n=1, cutoff=0.75)):
                return f": did you mean {near[0]}?"
        return ""


def with_config(arguments: list[str], demo_config: Path) -> list[str]:
    """Put the configuration that the arguments imply in front of them, so that they override it."""

    def values_of(*options: str) -> list[str]:
        return [
            following if argument in options else argument.split("=", 1)[1]
            for argument, following in pairwise([*arguments, ""])
            if argument in options or argument.startswith(tuple(f"{option}=" for option in options))
        ]

    resumed, configs = values_of("--resume"), values_of("--config", "-c")
    if len(resumed) > 1:
        raise UserError(f"--resume is given {len(resumed)} times: give the one run to go on with")
    arguments = _without("--resume", arguments)
    if resumed and resumed[0] != AUTO:
        chosen = intact_checkpoint(resumed[0])
        config = chosen.parent.parent / CONFIG
        if not config.is_file():
            raise UserError(f"{config} is missing: a run is resumed with the configuration it left")
        configs.insert(0, str(config))
        arguments = ["--config", str(config), *arguments, "--resume", str(chosen)]
    else:
        if not configs:
            configs, arguments = [str(demo_config)], ["--config", str(demo_config), *arguments]
        # The command line that has started the run says it all, lists that are added to (+=) included.
        if resumed and (newest := _newest_of_name(configs, arguments)) is not None:
            arguments = [*arguments, "--resume", str(newest)]
    for file in configs:
        check_yaml(Path(file))
    return arguments


def resumes_itself(arguments: list[str]) -> bool:
    """Return whether the arguments leave it to the suite what to go on with: `--resume auto`."""
    return f"--resume={AUTO}" in arguments or ("--resume", AUTO) in pairwise(arguments)


def _without(option: str, arguments: list[str]) -> list[str]:
    """Return the arguments without an option and its value."""
    kept, following = [], False
    for argument in arguments:
        if not following and argument != option and not argument.startswith(f"{option}="):
            kept.append(argument)
        following = not following and argument == option
    return kept


def _newest_of_name(configs: list[str], arguments: list[str]) -> Path | None:
    """Return the newest intact checkpoint of the runs that the arguments name; None, and a word, if there is none."""
    place = dict(PLACE)
    for file in configs:
        place |= {key: value for key, value in scalars(Path(file)) if key in PLACE}
    for argument, following in pairwise([*arguments, ""]):
        for key in PLACE:
            if argument == f"--{key}" or argument.startswith(f"--{key}="):
                place[key] = following if argument == f"--{key}" else argument.split("=", 1)[1]
    runs = Path(place["runs_dir"]) / place["name"]
    found = newest_intact(runs)
    if found is None:
        say(f"nothing to resume below {runs}: a new run starts")
    return found
