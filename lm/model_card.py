"""The README.md of exported weights: what the model is, how to load it, what was measured."""

from typing import Any

from lm.hf_format import is_plain
from lm.hf_write import end_of_text
from lm.model import LlamaConfig, num_parameters
from lm.tokenizers import Tokenizer
from pretrain.run import versions


def model_card(
    config: LlamaConfig,
    run: dict[str, Any],
    summary: dict[str, Any],
    step: int,
    tokenizer: Tokenizer,
    auto_tokenizer: bool,
    dtype: str,
) -> str:
    """Return the card as Markdown.

    Args:
        run: the run's configuration.
        summary: its summary.json; {} if it is gone.
        step: optimizer steps that the weights have seen.
        auto_tokenizer: whether AutoTokenizer reads the tokenizer's files.
    """
    kind = config.ffn.kind
    what = f"LlamaMoE whose experts are `{kind}` layers" if config.moe else f"Llama with `{kind}` feed-forward layers"
    parts = [
        _front_matter(kind),
        f"# {run.get('name', 'model')}\n\nA {what}, pre-trained with moa-pretrain {versions()['moa-pretrain']}. "
        f"The weights are {dtype}, those after optimizer step {step:,}.",
        _use(config, auto_tokenizer),
        _metrics(run, summary, step),
        _parameters(config),
        _tokens(config, run, tokenizer, auto_tokenizer),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(kind: str) -> str:
    return f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- moa-pretrain\n- {kind}\n---"


def _use(config: LlamaConfig, auto_tokenizer: bool) -> str:
    needs = "" if is_plain(config) else "import lm.hf  # knows this model: pip install 'moa-pretrain[hf]'\n"
    names = "AutoModelForCausalLM, AutoTokenizer" if auto_tokenizer else "AutoModelForCausalLM"
    if auto_tokenizer:
        tokenizer = "tokenizer = AutoTokenizer.from_pretrained(folder)"
        ids = 'tokenizer("Once upon a time", return_tensors="pt").input_ids'
    else:
        needs = "import sentencepiece\nimport torch\n" + needs
        tokenizer = 'tokenizer = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")'
        ids = 'torch.tensor([tokenizer.encode("Once upon a time")])'
    return f"""## Use it

```python
{needs}from transformers import {names}

folder = "path/to/this/folder"
{tokenizer}
model = AutoModelForCausalLM.from_pretrained(folder)
ids = {ids}
print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0].tolist()))
```"""


def _metrics(run: dict[str, Any], summary: dict[str, Any], step: int) -> str:
    measured: dict[str, float] = next(
        (m for m in (summary.get("final"), summary.get("best")) if m and m.get("step") == step), {}
    )
    rows = [f"| {name} | {value:.4f} |" for name, value in measured.items() if name != "step" and value is not None]
    data = run["data"]
    held_out = data.get("val_source") or "documents held out of it"
    seen = step * data["global_batch_size"] * data["sequence_length"]
    text = f"## Measured\n\nTrained on {seen:,} tokens of {data['source']}; validated on {held_out}."
    if not rows:
        return f"{text} Nothing was measured at this step."
    return "\n".join([text, "", "| metric | value |", "|---|---|", *rows])


def _parameters(config: LlamaConfig) -> str:
    total, activated = num_parameters(config), num_parameters(config, activated=True)
    rows = [f"| {role} | {number:,} | {activated[role]:,} |" for role, number in total.items() if number]
    rows.append(f"| **total** | **{sum(total.values()):,}** | **{sum(activated.values()):,}** |")
    return "\n".join(["## Parameters", "", "| role | number | used by a token |", "|---|---|---|", *rows])


def _tokens(config: LlamaConfig, run: dict[str, Any], tokenizer: Tokenizer, auto_tokenizer: bool) -> str:
    name, length = run["data"]["tokenizer"], run["data"]["sequence_length"]
    lines = [
        f"## Tokens\n\nThe tokenizer is `{name}` with {tokenizer.n_vocab:,} ids. Every document ends with the id "
        f"{tokenizer.eot}, and the next begins after it. Training sequences had {length:,} tokens. "
        "No special token is added to a text, and there is none for padding: for batches of texts set one, and pad on "
        "the left to generate."
    ]
    if auto_tokenizer:
        lines.append(
            f"A text that spells `{end_of_text(tokenizer)}` becomes that token in the exported tokenizer; in "
            "training the same spelling was read as characters."
        )
    if padding := config.vocab_size - tokenizer.n_vocab:
        lines.append(
            f"Embedding and head have {config.vocab_size:,} rows. The last {padding:,} belong to no token; they are "
            "kept so that every logit is that of training, and `generate` never draws them (`suppress_tokens`)."
        )
    return "\n\n".join(lines)
