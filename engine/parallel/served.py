"""What ranks serve: the table in docs/operating.md, and the reasons of what is refused."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of models or requests.

    Attributes:
        name: What it is, in Markdown.
        tensor: Why tensor parallel refuses it; None if it is served.
        pipeline: Why stages refuse it; None if it is served.
    """

    name: str
    tensor: str | None = None
    pipeline: str | None = None


def _refused(name: str, why: str) -> Feature:
    return Feature(name, why, why)


KV_DISK = _refused("`--kv-disk`", "ranks do not write their blocks yet")
KV_SPILL = _refused("`--kv-spill`", "ranks do not spill their blocks yet")
EMBEDDING = _refused("embedding models", "they run in one process")
GPUS = Feature("GPUs", pipeline="stages run on CPUs only yet")
FEATURES = (
    Feature("decoders with transformers' plan, mixtures of experts, windows, sinks (GPT-OSS)"),
    Feature("whole experts (`--expert-parallel`)", pipeline="within a stage: with tensor parallel"),
    Feature("latent attention (DeepSeek; tensor parallel keeps all latents on each rank)"),
    Feature(
        "states (Mamba, gated delta rules, convolutions; tensor parallel keeps their layers whole"
        " on each rank)"
    ),
    Feature("decoders without transformers' plan", "it has no plan of their parts"),
    Feature("swap, recomputing, prefix caching, chunked prompts, migration"),
    Feature("sampling, beams, constraints, prompt log-probabilities"),
    Feature("`--speculation ngram`, `suffix`, `auto`"),
    Feature("`--quantization`"),
    Feature("GGUF files, and checkpoints with quantized weights (AWQ, GPTQ, fp8, ...)"),
    Feature("`--kv-cache-dtype int8`, `fp8`"),
    Feature("adapters (`--lora`, `--enable-lora`)"),
    Feature("`--draft-model` (rank 0 alone runs the draft model)"),
    KV_DISK,
    KV_SPILL,
    EMBEDDING,
    Feature("images (rank 0 alone runs the vision encoder)"),
    GPUS,
)
