"""What only a language model can show: its text."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lm.sampling import generate


class TextSamples(L.Callback):
    """Write, at every validation, what the model says after the start of a validation document, as `samples`.

    Args:
        prompt_tokens: how much of the document it is given.
        n_tokens: how much it writes.
    """

    def __init__(self, prompt_tokens: int = 48, n_tokens: int = 160) -> None:
        self.prompt_tokens = prompt_tokens
        self.n_tokens = n_tokens
        self.latest = ""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        prompt = data.val_prompt(self.prompt_tokens)
        # Compiled blocks would be compiled again for every length.
        with trainer.precision_plugin.forward_context(), torch.compiler.set_stance("force_eager"):
            (written,) = generate(
                pl_module.model,
                [prompt],
                self.n_tokens,
                n_vocab=data.tokenizer.n_vocab,
                max_length=data.sequence_length,
            )
        self.latest = f"{data.tokenizer.decode(prompt)}⟶{data.tokenizer.decode(written)}"
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_text("samples", self.latest, global_step=trainer.global_step)
