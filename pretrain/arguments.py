"""What the command line says: which configuration it implies, and how its mistakes are told."""

import difflib
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from pretrain.errors import EXIT_CODE, UserError
from pretrain.recovery import intact_checkpoint, newest_intact, say
from pretrain.run import CONFIG

AUTO = "auto"  # --resume: whatever there is
PLACE = {"runs_dir": "runs", "name": "run"}  # the settings that say where a run lies, and their defaults


def one_line(message: str) -> str:
    """Return a message of the parser in one line; of a value that fits none of many types, what was expected."""
    text = " ".join(message.split())
    if own := re.search(r"Errors: - (?!Expected)(.+?) - Expected ", text):  # a configuration's own words say it best
        return own[1]
    return re.sub(r"Does not validate against any of the Union subtypes Subtypes: .*? Errors: ", "", text)


class OneLineParser(LightningArgumentParser):
    """A parser whose errors are one line: what is wrong, and the nearest valid key."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = one_line(message)
        print(f"error: {text}{self._suggestion(text)} (--help lists all keys)", file=sys.stderr)
        sys.exit(EXIT_CODE)

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
        found: Path | None = intact_checkpoint(resumed[0])
        assert found is not None
        config = found.parent.parent / CONFIG
        if not config.is_file():
            raise UserError(f"{config} is missing: a run is resumed with the configuration it left")
        configs.insert(0, str(config))
        arguments = ["--config", str(config), *arguments]
    else:
        if not configs:
            configs, arguments = [str(demo_config)], ["--config", str(demo_config), *arguments]
        # The command line that has started the run says it all, lists that are added to (+=) included.
        found = _newest_of_name(configs, arguments) if resumed else None
    if found is not None:
        arguments = [*arguments, "--resume", str(found)]
    for file in configs:
        check_yaml(Path(file))
    return arguments


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
        check_yaml(Path(file))
        place |= {key: value for key, value in yaml.safe_load(Path(file).read_text()).items() if key in PLACE}
    for argument, following in pairwise([*arguments, ""]):
        for key in PLACE:
            if argument == f"--{key}" or argument.startswith(f"--{key}="):
                place[key] = following if argument == f"--{key}" else argument.split("=", 1)[1]
    runs = Path(place["runs_dir"]) / place["name"]
    found = newest_intact(runs)
    if found is None:
        say(f"nothing to resume below {runs}: a new run starts")
    return found


def check_yaml(file: Path) -> None:
    """Raise a UserError for what the parser would misread, or read without a word: a key that stands twice."""
    if not file.is_file():
        raise UserError(f"the configuration {file} does not exist, or is no file")
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"the configuration {file} cannot be read: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"the configuration {file} holds no keys")
    mappings = [root]
    while mappings:
        seen: set[str] = set()
        for key, value in mappings.pop().value:
            if key.value in seen:
                raise UserError(f"{file}, line {key.start_mark.line + 1}: the key {key.value!r} stands there twice")
            seen.add(key.value)
            if isinstance(value, yaml.MappingNode):
                mappings.append(value)
        if (
            "resume" in seen
            and root.value
            and any(k.value == "resume" and v.value not in ("null", "") for k, v in root.value)
        ):
            raise UserError(f"{file} sets resume, which is an argument of the command line: --resume RUN")
