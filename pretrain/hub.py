"""Datasets by name: how a source on the Hugging Face hub is written, and the `datasets` library, quiet."""

import re
from functools import cache
from typing import Any

from pretrain.errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# NAME[:SUBSET[:SPLIT]]; an empty subset is the dataset's default one.
HUB_SOURCE = re.compile(rf"(?P<name>{HUB_NAME.pattern})(:(?P<subset>[^:/]*)(:(?P<split>[^:/]+))?)?", re.ASCII)


def hub_dataset(source: str) -> tuple[str, str | None, str]:
    """Name, subset and split of a source NAME[:SUBSET[:SPLIT]]; the default subset and the train split unless named."""
    match = HUB_SOURCE.fullmatch(source)
    if match is None:
        raise UserError(f"{source} is no Hugging Face dataset: write NAME, NAME:SUBSET or NAME:SUBSET:SPLIT")
    return match["name"], match["subset"] or None, match["split"] or "train"


@cache  # one answer for a process, whatever happens on the hub meanwhile
def hub_revision(source: str) -> str | None:
    """The commit that a dataset on the hub is at; None if the hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(hub_dataset(source)[0], timeout=10).sha
    except Exception:  # many kinds, as when it is opened, which then says what is wrong
        return None


def quiet_datasets() -> Any:
    """The `datasets` library, quiet: what goes wrong is told once, in our words, and nobody is told that it is used."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else even a local file is counted on a server

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def reason(error: BaseException) -> str:
    """An exception as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
