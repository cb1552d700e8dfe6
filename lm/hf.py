"""Our models in Hugging Face transformers: `import lm.hf`, then AutoModelForCausalLM, pipeline, generate, Trainer.

`MoaLlamaForCausalLM` wraps `lm.model.Llama` with any feed-forward kind, dense or with experts, for checkpoints that
`lm.export` has written. The mathematics is the model's own; here are only the arguments that transformers passes.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lm.cache import KeyValueCache, LayerCache
from lm.hf_format import OWN, config_from_dict, config_to_dict
from lm.model import Block, Llama, LlamaConfig
from lm.moe import Experts, MoE, Routing
from moa import FeedForward

try:
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
    from transformers.configuration_utils import PretrainedConfig
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError("lm.hf needs Hugging Face transformers: pip install 'moa-pretrain[hf]'") from error

# What the library calls the keys and values of earlier tokens, in arguments and outputs: `cache` in newer versions.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class MoaLlamaConfig(PretrainedConfig):
    """The configuration of a `MoaLlamaForCausalLM`.

    Args:
        llama: `lm.model.LlamaConfig` as nested dictionaries; missing keys have its defaults.
        max_position_embeddings: tokens of the sequences in training.
        use_cache: return keys and values outside training unless told otherwise.

    Raises:
        ValueError: an unknown key in `llama`, or a value that cannot be.
    """

    model_type = OWN
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012  # the library declares it so

    def __init__(
        self,
        llama: dict[str, Any] | None = None,
        max_position_embeddings: int = 1024,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.llama = config_to_dict(config_from_dict(llama or {}))
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(**({"tie_word_embeddings": False} | kwargs))
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings is set, but embedding and head of this model are two matrices")

    def llama_config(self) -> LlamaConfig:
        """Return the model's own configuration."""
        return config_from_dict(self.llama)

    # The sizes under the names that the library asks for.

    @property
    def vocab_size(self) -> int:
        return self.llama["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:  # resize_token_embeddings does this
        self.llama["vocab_size"] = value

    @property
    def hidden_size(self) -> int:
        return self.llama["d_model"]

    @property
    def num_hidden_layers(self) -> int:
        return self.llama["n_layers"]

    @property
    def num_attention_heads(self) -> int:
        return self.llama["n_heads"]


class RecomputedBlock(Block):
    """A block that, if told so, computes its forward anew in the backward of training, as transformers asks for."""

    gradient_checkpointing = False
    recompute: Callable[..., Any]  # set together with it

    def forward(
        self,
        x_BLD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> tuple[torch.Tensor, Routing | None]:
        # With a cache, the second forward would add its keys once more.
        if not (self.gradient_checkpointing and self.training and cache is None):
            return super().forward(x_BLD, cos, sin, mask, cache)
        x_BLD, *routing = self.recompute(self._flat_forward, x_BLD, cos, sin, mask)
        return x_BLD, Routing(*routing) if routing else None

    def _flat_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        # A reentrant checkpoint finds the tensors of the outermost tuple alone.
        x_BLD, routing = super().forward(*args)
        return (x_BLD, *(routing or ()))


class MoaLlamaForCausalLM(PreTrainedModel, GenerationMixin):
    """A Llama or LlamaMoE with any feed-forward kind of `moa`, as transformers wants a causal language model.

    In training mode the loss of a mixture of experts has the router's losses added, weighted as in pre-training. The
    bias of loss-free balancing is saved and used, but only pre-training moves it.
    """

    config_class = MoaLlamaConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # `num_items_in_batch`
    _no_split_modules = ["RecomputedBlock"]  # noqa: RUF012
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config: MoaLlamaConfig) -> None:
        super().__init__(config)
        self.model = Llama(config.llama_config())
        for block in self.model.blocks:
            block.__class__ = RecomputedBlock  # the parameters keep their names
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Return logits, loss and cache.

        Args:
            input_ids: (B, L) token ids.
            attention_mask: (B, tokens so far and these), 0 for padding at either end of a row.
            labels: (B, L), compared with the token before each; -100 is left out.
            cache: keys and values of the tokens before these, a `Cache` of the library.
            past_key_values: the same under its older name.
            use_cache: return a cache; default: config.use_cache, and no in training.
            logits_to_keep: compute those of the last so many tokens only, or of these places; 0: all.
            num_items_in_batch: labels in the whole optimizer step, of which this batch is a part: the loss is its share
                of the step's mean. None: the mean over this batch.
            return_dict: False: a tuple.

        Raises:
            TypeError: arguments of other models, such as inputs_embeds or output_attentions.
            ValueError: an attention mask of another form, or with a gap.
        """
        unknown = sorted(name for name, value in others.items() if value is not None and value is not False)
        if unknown:
            raise TypeError(f"{type(self).__name__} does not take {', '.join(unknown)}")
        cache = past_key_values if cache is None else cache
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        past = 0 if cache is None else int(cache.get_seq_length())
        segments = padding_segments(attention_mask, (input_ids.shape[0], past + input_ids.shape[1]))
        view = None if cache is None else CacheView(cache, past, self.config.num_hidden_layers, segments)
        new_segments = None if segments is None else segments[:, past:]
        hidden_BLD, routing = self.model.hidden(input_ids, new_segments, view)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(hidden_BLD[:, kept])

        loss = None if labels is None else self._loss(logits, labels, routing, num_items_in_batch)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache if use_cache else None})
        by_name = self.config.return_dict if return_dict is None else return_dict
        return output if by_name else output.to_tuple()

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        routing: Routing | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor:
        loss = self.loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
        )
        if routing is None or not self.training:
            return loss
        moe = self.model.config.moe
        assert moe is not None
        share = 1 if num_items_in_batch is None else (labels[:, 1:] != -100).sum() / num_items_in_batch
        return loss + share * moe.router_loss(routing)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("cache_position", None)  # before transformers 5: the length of the cache says the same
        return inputs

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of a module that a checkpoint lacks, as the table of `Llama` says."""
        config = self.model.config
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=config.init_std)
        elif isinstance(module, FeedForward | Experts):  # after their linear layers: gates may start elsewhere
            config.ffn.reset(module, config.init_std)
        elif isinstance(module, MoE):
            nn.init.zeros_(module.balance_bias)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Recompute every n-th block in the backward, or none; what the library's public switches call."""
        for index, block in enumerate(self.model.blocks):
            block.gradient_checkpointing = enable and index % every_n_layers == 0
            block.recompute = gradient_checkpointing_func

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings


class CacheView(KeyValueCache):
    """A `Cache` of transformers in the form that `Llama` reads and fills, for one forward pass.

    Args:
        cache: of the library.
        past: tokens of each sequence in it.
        n_layers: the model's.
        segments_BL: documents of all tokens, those in the cache and the new ones; None: each row is one.
    """

    def __init__(self, cache: Any, past: int, n_layers: int, segments_BL: torch.Tensor | None) -> None:
        self.layers: list[Any] = [LayerView(cache, index) for index in range(n_layers)]
        self.segments_BL = segments_BL
        self._past = past

    @property
    def length(self) -> int:
        return self._past

    def add_segments(self, segments_BL: torch.Tensor) -> torch.Tensor:
        assert self.segments_BL is not None
        return self.segments_BL  # the attention mask speaks of all tokens at once


class LayerView(LayerCache):
    """One layer of a `Cache`."""

    def __init__(self, cache: Any, index: int) -> None:
        self.cache = cache
        self.index = index

    def extend(self, k_BHLK: torch.Tensor, v_BHLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.update(k_BHLK, v_BHLK, self.index)


def padding_segments(attention_mask: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return documents that keep padding apart: 0 for text, -1 for padding; None where there is none.

    Args:
        attention_mask: 1 for text, 0 for padding.
        shape: (B, tokens so far), the mask's.

    Raises:
        ValueError: another shape, or padding inside a text.
    """
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)} instead of {shape}: one number for each "
            "token, those in the cache included (a static cache, which brings masks of its own, is not supported)"
        )
    text = attention_mask.bool()
    if text.all():
        return None
    begins = text.clone()
    begins[:, 1:] &= ~text[:, :-1]
    if (begins.sum(1) > 1).any():
        raise ValueError("attention_mask has a gap inside a text: pad rows at their ends, and on the left to generate")
    return text.long() - 1


AutoConfig.register(OWN, MoaLlamaConfig)
AutoModelForCausalLM.register(MoaLlamaConfig, MoaLlamaForCausalLM)
# By these names the Trainer's label smoothing knows whose labels have to be shifted, and the harness what is causal.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[OWN] = MoaLlamaForCausalLM.__name__
