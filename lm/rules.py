"""Which optimizer trains which parameter of a language model."""

from pretrain.optim import Algorithm, MuonConfig, OptimizerConfig, Rule


def optimizer_rules(config: OptimizerConfig) -> list[Rule]:
    """Groups of Llama and LlamaMoE, by role.

    With `muon_adamw`, Muon trains the matrices of the Transformer layers, each expert's own, and AdamW all else:
    embedding, head, norms, router and, unless `muon.gates` says otherwise, gates (paper, training appendix). With
    `adamw` the groups are the same. `decay=False` marks what `decay: matrices` exempts.
    """
    matrices: Algorithm = "muon" if config.name == "muon_adamw" else "adamw"
    gates: Algorithm = (config.muon or MuonConfig()).gates if config.name == "muon_adamw" else "adamw"
    return [
        Rule("embed", r"(^|\.)embed\.weight$"),
        Rule("head", r"(^|\.)head\.weight$", optional=True),  # absent when tied to the embedding
        Rule("norms", r"norm\.weight$", decay=False),
        Rule("biases", r"(^|[._])bias$", decay=False, optional=True),
        Rule("coefficients", r"\.ffn\.(.+\.)?(alpha|beta)$", decay=False, optional=True),
        Rule("router", r"\.ffn\.router\.weight$", optional=True),
        Rule("gates", r"\.ffn\.(.+\.)?[uv](\.weight)?$", optimizer=gates, optional=True),
        Rule("attention", r"\.attn\.[qkvo]\.weight$", optimizer=matrices),
        Rule("ffn", r"\.ffn\.(shared\.)?w[123]\.weight$", optimizer=matrices, optional=True),
        Rule("experts", r"\.ffn\.experts\.w[123](\.weight)?$", optimizer=matrices, optional=True),
    ]
