"""What can be set about an engine."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from octavo.common.connections import ConnectionSettings
from octavo.common.listening import TlsSettings
from octavo.common.tracing_settings import TracingSettings
from octavo.engine.scheduling.swap_or_recompute import PreemptionMode

Quantization = Literal["none", "int8", "int4"]
KVCacheDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2"]


class EngineSettings(TracingSettings, ConnectionSettings, TlsSettings):
    """Settings of `octavo engine`; each is a flag, a variable and a TOML key."""

    table: ClassVar[str] = "engine"

    model: str = Field(
        description="Hub name, local directory, GGUF file, or `demo` (SmolLM2-135M-Instruct)."
    )
    served_model_name: str | None = Field(
        None, description="Name that clients use. Default: the value of --model."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    metrics_port: int = Field(
        9152,
        ge=0,
        le=65535,
        description="Port for Prometheus metrics; 0 is off. If the default is taken, they are at a"
        " free port that the log names.",
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="Where to compute.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of weights. auto: what model and device are best at."
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="Type of the KV cache: the model's, or on a GPU fp8, at a little quality.",
    )
    quantization: Quantization = Field(
        "none",
        description="Bits of the linear layers' weights, on a CPU; int8 and int4 cost a little"
        " quality. Experts of a mixture stay as they are.",
    )
    compile: Literal["auto", "wait", "off"] = Field(
        "auto",
        description="Compile the model. On a CPU once a machine: auto answers meanwhile, wait"
        " starts when it is done. On a GPU at every start.",
    )
    cuda_graphs: bool = Field(
        True, description="On a GPU, replay decodes as CUDA graphs, recorded at the start."
    )
    async_scheduling: bool = Field(
        True, description="On a GPU, launch each step before the one before it is done."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and output. Default: what the model allows."
    )
    block_size: int = Field(16, description="Tokens per KV-cache block: a power of two, 8 to 256.")
    cache_memory: float | None = Field(
        None, gt=0, description="GiB for the KV cache. Default: what the device has to spare."
    )
    num_blocks: int | None = Field(
        None, ge=1, description="KV-cache blocks; wins over --cache-memory."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory that the engine may use."
    )
    swap_space: float | None = Field(
        None,
        ge=0,
        description="GiB of CPU memory for preempted requests and evicted prefixes; 0 is none."
        " Default: 2, or a quarter of what is free if that is less.",
    )
    preemption: PreemptionMode = Field(
        "auto", description="How a preempted request gives up its blocks. auto: the cheaper way."
    )
    enable_prefix_caching: bool = Field(
        True, description="Share full blocks between requests with a common prefix."
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Most sequences in the running batch. Default: 128 on a CPU, 256 on a GPU.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens computed in a step. Default: 512 on a CPU, 8192 on a GPU.",
    )
    max_outputs: int = Field(64, ge=1, description="Most outputs of one request (n).")
    max_waiting: int = Field(4096, ge=1, description="Most requests in the engine's queue.")
    max_message_bytes: int = Field(
        64 << 20, ge=1 << 16, description="Largest message from a router, in bytes."
    )
    max_failed_steps: int = Field(
        3,
        ge=1,
        description="Failed steps in a row after which the engine exits with an error.",
    )
    step_timeout: float | None = Field(
        None,
        ge=0,
        description="Seconds after which a step counts as hung and the engine exits with an"
        " error; 0 disables the limit. Default: 300 on a CPU, 120 on a GPU.",
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish on SIGTERM."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        batched, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if batched is not None and seqs is not None and batched < seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({batched}) must be at least --max-num-seqs"
                f" ({seqs}): every running sequence decodes a token a step"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that clients put in requests."""
        return self.served_model_name or self.model
