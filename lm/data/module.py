"""Text for a run: from a source to sequences of tokens."""

from pathlib import Path

from lm.data.manifest import is_prepared
from lm.data.packing import PackedTokens
from lm.data.prepared import cached_prepare
from lm.data.split import PreparedSplit, open_prepared
from lm.tokenizers import Tokenizer, load_tokenizer
from pretrain.data import PretrainData, check_vendored
from pretrain.errors import UserError

ASSETS = Path(__file__).parent.parent / "assets"
# Text that travels with the package.
VENDORED = {"demo:train": ASSETS / "sotu" / "train.jsonl", "demo:val": ASSETS / "sotu" / "val.jsonl"}


class TextData(PretrainData):
    """Documents, tokenized once into a cache, joined with end-of-text and cut into sequences.

    Args:
        source: text to train on: a file, folder or glob of .txt, .jsonl or .parquet (each also .gz, .zst), a folder
            that lm.prepare made, a Hugging Face dataset NAME[:SUBSET[:SPLIT]], or demo:train.
        val_source: text to validate on; null: held out of `source`, by document.
        tokenizer: bytes, gpt2, a tokenizer.json, a SentencePiece .model, or a hub name.
        sequence_length: tokens per sequence.
        global_batch_size: sequences per optimizer step, over all devices.
        micro_batch_size: sequences per forward pass on one device.
        document_mask: keep attention and positions within a document.
        text_field: name of the text in .jsonl, .parquet and Hugging Face rows.
        val_fraction: share of the documents held out when val_source is null; 0: no validation.
        max_bad: broken rows to pass over before giving up.
        max_tokens: stop preparing after so many tokens; null: all.
        cache_dir: where prepared text is kept; null: $MOA_CACHE, or ~/.cache/moa-pretrain/prepared.
        prepare_workers: processes that tokenize; null: one for each core.
        num_workers: processes that load sequences, per device.
        seed: decides the order of the sequences; null: seed_everything.
    """

    may_change_on_resume = (*PretrainData.may_change_on_resume, "prepare_workers")

    def __init__(
        self,
        source: str,
        val_source: str | None = None,
        tokenizer: str = "gpt2",
        sequence_length: int = 1024,
        global_batch_size: int = 512,
        micro_batch_size: int = 8,
        document_mask: bool = False,
        text_field: str = "text",
        val_fraction: float = 0.01,
        max_bad: int = 0,
        max_tokens: int | None = None,
        cache_dir: str | None = None,
        prepare_workers: int | None = None,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(global_batch_size, micro_batch_size, num_workers, seed)
        if sequence_length < 1:
            raise UserError(f"data.sequence_length is {sequence_length}: it has to be at least 1")
        if max_bad < 0:
            raise UserError(f"data.max_bad is {max_bad}: it has to be 0 or more")
        self.source = source
        self.val_source = val_source
        self.tokenizer_name = tokenizer
        self.sequence_length = sequence_length
        self.document_mask = document_mask
        self.val_fraction = val_fraction
        self.max_tokens = max_tokens
        self.cache_dir = cache_dir
        self.text_field = text_field
        self.max_bad = max_bad
        self.prepare_workers = prepare_workers
        self._tokenizer: Tokenizer | None = None
        self._val_split: PreparedSplit | None = None
        self._is_set_up = False

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name)
        return self._tokenizer

    @property
    def units_per_sample(self) -> int:
        return self.sequence_length

    def known_samples(self) -> int | None:
        if is_prepared(self.source):
            return len(self._packed(open_prepared(self.source, "train")))
        return None if self.max_tokens is None else -(-self.max_tokens // self.sequence_length)

    def prepare_data(self) -> None:
        """Tokenize into the cache what is not there yet; one process does it, the others wait for it."""
        self._train_folder()
        if self.val_source is not None:
            self._val_folder()

    def setup(self, stage: str) -> None:
        if self._is_set_up:
            return
        self.train_dataset = self._packed(open_prepared(self._train_folder(), "train"))
        self._val_split = self.open_val_split()
        if self._val_split is not None:
            self.val_dataset = self._packed(self._val_split)
        self._is_set_up = True

    def open_val_split(self) -> PreparedSplit | None:
        """The text to validate on, tokenized now if the cache lacks it; None when nothing is held out."""
        if self.val_source is not None:
            # A source of its own was prepared whole, as its train split.
            return open_prepared(self._val_folder(), "train")
        if self.val_fraction > 0:  # a folder that was prepared without says what to do
            return open_prepared(self._train_folder(), "val")
        return None

    @property
    def val_tokens_per_byte(self) -> float | None:
        """Tokens of the validation text, ends of text included, over its UTF-8 bytes; None without validation."""
        return self._val_split.n_tokens / self._val_split.n_bytes if self._val_split is not None else None

    def val_prompt(self, n_tokens: int) -> list[int]:
        """Return the first tokens of the validation text."""
        assert self._val_split is not None
        return self._val_split.read(0, min(n_tokens, self._val_split.n_tokens)).tolist()

    def _packed(self, split: PreparedSplit) -> PackedTokens:
        return PackedTokens(split, self.sequence_length, self.document_mask)

    def _train_folder(self) -> Path:
        held_out = 0.0 if self.val_source is not None else self.val_fraction
        return self._prepared(self.source, held_out, self.max_tokens)

    def _val_folder(self) -> Path:
        assert self.val_source is not None
        return self._prepared(self.val_source, 0.0, None)

    def _prepared(self, source: str, val_fraction: float, max_tokens: int | None) -> Path:
        check_vendored(source, VENDORED)
        return cached_prepare(
            str(VENDORED.get(source, source)),
            self.tokenizer,
            text_field=self.text_field,
            val_fraction=val_fraction,
            max_bad=self.max_bad,
            max_tokens=max_tokens,
            workers=self.prepare_workers,
            cache=self.cache_dir,
        )
