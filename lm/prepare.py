"""Tokenize documents once, into a folder that training reads: `python -m lm.prepare --source ... --output ...`."""

import shlex

from jsonargparse import ArgumentParser

from lm.data.manifest import Manifest
from lm.data.prepared import SHARD_TOKENS, prepare
from pretrain.errors import UserError, command
from pretrain.paths import output_path


def prepare_documents(
    source: str,
    output: str,
    tokenizer: str = "gpt2",
    text_field: str = "text",
    val_fraction: float = 0.0,
    max_bad: int = 0,
    max_tokens: int | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
) -> None:
    """Tokenize documents once, into a folder of token shards that lm.fit reads with --data.source.

    Args:
        source: A .txt, .jsonl or .parquet file (each also .gz or .zst), a folder or a quoted glob of them, or the
            name of a Hugging Face dataset, which is streamed: NAME[:SUBSET[:SPLIT]]. One .txt file or one row is
            one document.
        output: The folder to make. It appears when it is complete; an interruption leaves nothing.
        tokenizer: bytes, gpt2, a local tokenizer.json or SentencePiece .model, or a Hugging Face name.
        text_field: The field of .jsonl, .parquet and Hugging Face rows that holds the text.
        val_fraction: The share of documents to hold out for validation, evenly spread, 0 to 0.5.
        max_bad: How many broken rows may be left out; they are counted and the first few named.
        max_tokens: Stop after the document that brings the total to this number of tokens.
        workers: Processes that tokenize; all cores when not given. The result is the same for any number.
        shard_tokens: Tokens per file.
        overwrite: Replace the output folder if it is a prepared one.
    """
    manifest = prepare(
        source,
        output_path(output),
        tokenizer,
        text_field=text_field,
        val_fraction=val_fraction,
        max_bad=max_bad,
        max_tokens=max_tokens,
        workers=workers,
        shard_tokens=shard_tokens,
        overwrite=overwrite,
    )
    print(summary(manifest, output))


def summary(manifest: Manifest, output: str) -> str:
    """What was written and how to train on it, some lines."""
    lines = [f"{output}: tokenizer {manifest.tokenizer}, {manifest.n_vocab:,} ids, {manifest.dtype}"]
    for name, info in manifest.splits.items():
        lines.append(
            f"  {name}: {info.documents:,} documents, {info.tokens:,} tokens, {info.bytes:,} bytes of text "
            f"({info.bytes / info.tokens:.2f} per token), {len(info.shards)} file(s)"
        )
    left_out = {name.replace("_", " "): count for name, count in manifest.skipped.items() if isinstance(count, int)}
    if any(left_out.values()):
        lines.append("  left out: " + ", ".join(f"{count:,} {name}" for name, count in left_out.items() if count))
        lines.extend(f"    {row}" for row in manifest.skipped["first_bad_rows"])
    lines.append(f"train on it: {fit_command(manifest, output)}")
    return "\n".join(lines)


def fit_command(manifest: Manifest, output: str) -> str:
    """The demo's model on this text: what differs from the demo is said."""
    arguments = {"data.source": output, "data.val_source": "null", "data.tokenizer": manifest.tokenizer}
    if "val" not in manifest.splits:
        arguments["data.val_fraction"] = "0"
    # Heads of a multiple of 64 rows are faster on a GPU.
    arguments["model.vocab_size"] = str(-(-manifest.n_vocab // 64) * 64)
    return shlex.join(["python", "-m", "lm.fit", *(w for k, v in arguments.items() for w in (f"--{k}", v))])


class _Parser(ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        raise UserError(f"{message} (python -m lm.prepare --help lists the options)")


@command
def main(args: list[str] | None = None) -> None:
    """Run the command with `args`, by default those of the command line."""
    parser = _Parser(prog="python -m lm.prepare", description="Tokenize documents once, into a folder of token shards.")
    parser.add_function_arguments(prepare_documents, skip={"overwrite"})
    parser.add_argument("--overwrite", action="store_true", help="Replace the output folder if it is a prepared one.")
    prepare_documents(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
