"""The engine's settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from octavo.common.adapter_names import ADAPTER_NAME, ADAPTER_NAMES
from octavo.common.connections import ConnectionSettings
from octavo.common.listening import TlsSettings
from octavo.common.models.embedding import Pooling
from octavo.common.ports import Listener, metrics_listener
from octavo.common.tls import Tls
from octavo.common.tracing_settings import TracingSettings
from octavo.engine.models.quantization import SCHEMES
from octavo.engine.parallel.place import Machines
from octavo.engine.parallel.served import KV_DISK, KV_SPILL
from octavo.engine.scheduling.swap_or_recompute import PreemptionMode
from octavo.engine.speculation.method_names import METHOD_TEXTS
from octavo.kernels import BACKENDS

MetricsNames = Literal["octavo", "vllm", "both"]
if TYPE_CHECKING:  # mypy cannot read a computed Literal
    Device = str
    Quantization = str
    SpeculationMode = str
else:
    Device = Literal[("auto", *BACKENDS)]
    Quantization = Literal[("none", *SCHEMES)]
    SpeculationMode = Literal[("off", *METHOD_TEXTS, "auto")]


class EngineSettings(TracingSettings, ConnectionSettings, TlsSettings):
    """Settings of `octavo engine`: each is a flag, an environment variable and a TOML key."""

    table: ClassVar[str] = "engine"

    model: str = Field(
        description="Hub name, local directory, GGUF file, or `demo` (SmolLM2-135M-Instruct)."
    )
    revision: str | None = Field(
        None,
        pattern=r"^[\w.][\w./-]*$",
        description="Branch, tag or commit of a model of the hub, for its tokenizer too. Default:"
        " its main branch.",
    )
    served_model_name: list[str] = Field(
        [],
        description="Model name in requests and answers. May be given several times: requests may"
        " use any of the names, and answers have the first. Default: the value of --model.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    metrics_port: int = Field(
        9152,
        ge=0,
        le=65535,
        description="Port for Prometheus metrics; 0 disables them. If the default port is taken,"
        " the engine picks a free one and logs it.",
    )
    metrics_names: MetricsNames = Field(
        "octavo",
        description="Names of the metrics: Octavo's, those that vLLM has for the same, for endpoint"
        " pickers and dashboards that know these, or both.",
    )
    device: Device = Field(
        "auto",
        description="Device that runs the model. auto: a GPU if there is one, else the CPU."
        " cuda is an NVIDIA GPU, or an AMD GPU with PyTorch's build for ROCm; it is hardly"
        " tried: an earlier version has run on one H200.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Ranks that each hold a part of the model and of the KV cache, as processes of"
        " their own. The engine starts them on this machine, unless torchrun or another launcher"
        " that sets RANK and WORLD_SIZE has. On GPUs, more than 1 runs uncompiled.",
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Stages that each hold some of the layers, on CPUs. Each stage is as many ranks"
        " as --tensor-parallel-size says.",
    )
    pipeline_split: str | None = Field(
        None,
        pattern=r"^\d+(,\d+)*$",
        description="Number of layers of each stage, such as 20,12. Default: as even in memory as"
        " possible, with the embeddings in the first stage and the head in the last.",
    )
    expert_parallel: bool = Field(
        default=False,
        description="Give each rank of --tensor-parallel-size whole experts of a mixture, not a"
        " part of each.",
    )
    nnodes: int = Field(
        1,
        ge=1,
        le=64,
        description="Machines that the ranks are on, each with as many. Start the engine on each of"
        " them with the same settings and its own --node-rank.",
    )
    node_rank: int = Field(
        0, ge=0, description="This machine's number, below --nnodes. Machine 0 has rank 0."
    )
    master_addr: str | None = Field(
        None, description="Host of machine 0, where ranks on several machines find each other."
    )
    master_port: int = Field(29500, ge=1, le=65535, description="Port on --master-addr.")
    rank_timeout: float = Field(
        7.0,
        ge=2,
        description="Seconds that a rank may be silent before the engine ends with an error.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Data type of the weights. auto: the model's, if the device supports it well.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"] = Field(
        "auto",
        description="Data type of the KV cache. auto: that of the weights. fp8 and int8 halve its"
        " bytes and cost a little quality, int8 the least. fp8 is fp8_e4m3 if the device has it.",
    )
    quantization: Quantization = Field(
        "none",
        description="Quantization of linear layers and, on a CPU, experts; costs a little quality."
        + "".join(f" {name}: {text}." for name, text in SCHEMES.items()),
    )
    compile: Annotated[
        Literal["auto", "off"], BeforeValidator(lambda value: "auto" if value == "wait" else value)
    ] = Field(
        "auto",
        description="off: run the model's own Python code, operator by operator. That is slower,"
        " and a means to look for faults.",
    )
    pooling: Pooling | None = Field(
        None,
        description="How an embedding model pools the hidden states of a text, and that the model"
        " is one. Default: as the checkpoint's modules.json says; without one, the model generates"
        " text.",
    )
    normalize: bool | None = Field(
        None,
        description="Whether embeddings have length 1. Default: as the checkpoint's modules.json"
        " says, or not.",
    )
    matryoshka: bool = Field(
        False,
        description="Accept any number of leading dimensions of embeddings, for models that were"
        " trained for it but whose config.json does not say so.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On a GPU, record steps as CUDA graphs at the start and replay them: decodes,"
        " steps with chunks of prompts of up to 512 tokens and, with --speculation, those that"
        " verify drafts.",
    )
    async_scheduling: bool = Field(
        True, description="On a GPU, launch each step before the previous one has finished."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Maximum tokens of prompt and output. Default: the model's context."
    )
    block_size: int = Field(16, description="Tokens per KV-cache block: a power of two, 8 to 256.")
    cache_memory: float | None = Field(
        None,
        gt=0,
        description="KV cache size in GiB. Default: what --gpu-memory-utilization leaves, or on a"
        " CPU a quarter of the free memory, at most 4.",
    )
    num_blocks: int | None = Field(
        None, ge=1, description="Number of KV-cache blocks; overrides --cache-memory."
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory that the engine uses at most, 0 to 1.",
    )
    swap_space: float | None = Field(
        None,
        ge=0,
        description="GiB of CPU memory for preempted requests and evicted prefixes; 0 disables"
        " swapping. Default: 2, or a quarter of the free memory if that is less.",
    )
    kv_disk: Path | None = Field(
        None,
        description="Directory that keeps prefix blocks, also after the engine ends. Engines of one"
        " machine, or of one file system, may share it. Blocks are read through swap space.",
    )
    kv_disk_space: float = Field(
        10.0, gt=0, description="Maximum GiB of all files in --kv-disk; the least recently used go."
    )
    kv_spill: Path | None = Field(
        None,
        description="On a CPU, directory for the blocks of a sequence that the KV cache has no room"
        " for: each step reads them from a file there. One such sequence runs at a time.",
    )
    kv_spill_space: float = Field(
        10.0, gt=0, description="GiB of the file of --kv-spill, reserved at the start."
    )
    preemption: PreemptionMode = Field(
        "auto",
        description="How to preempt a request: swap its blocks out or recompute them. auto: the"
        " cheaper of both.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Share full KV-cache blocks between requests with a common prefix."
    )
    enable_lora: bool = Field(
        False,
        description="Accept LoRA adapters while the engine runs. On a GPU, steps with adapters"
        " run uncompiled; they are recorded as CUDA graphs for up to 8 adapters of rank 64 or"
        " less. --lora implies it.",
    )
    lora: list[str] = Field(
        [],
        description="LoRA adapter as NAME=PATH: a directory in peft's format, and the model name in"
        " requests. May be given several times.",
    )
    adapter_memory: float = Field(
        1.0,
        gt=0,
        description="GiB on a GPU for adapters; the least recently used stay in CPU memory.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Defaults of sampling parameters that a request does not set. auto: those of"
        " the model's generation_config.json. none: Octavo's own, whatever the model.",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Maximum sequences in the running batch. Default: 128 on a CPU, 256 on a GPU.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens computed in a step. Default: 512 on a CPU, 8192 on a GPU, 2048"
        " where texts are embedded.",
    )
    max_encoder_tokens: int = Field(
        1024,
        ge=1,
        description="Maximum tokens of images that a step encodes, but at least one image. On a CPU"
        " a step encodes for 0.1 s at most, and later steps the rest.",
    )
    encoder_cache_tokens: int = Field(
        16384,
        ge=0,
        description="Tokens of encoded images that are kept for requests that are computed again.",
    )
    speculation: SpeculationMode = Field(
        "off",
        description="Speculative decoding: draft tokens and verify them in one step. Outputs do not"
        " change."
        + "".join(f" {name}: {text}." for name, text in METHOD_TEXTS.items())
        + " auto: as suffix, but only for requests and batches where it is measured to pay.",
    )
    draft_model: str | None = Field(
        None,
        description="Model that drafts for --speculation draft: smaller, with the same tokens."
        " A hub name, a directory or a GGUF file.",
    )
    num_speculative_tokens: int = Field(
        8, ge=1, le=64, description="Maximum drafted tokens of a sequence per step."
    )
    constraint_timeout: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Processor seconds that compiling a constraint (a JSON schema, a regular"
        " expression, a grammar) may take; one that takes longer is refused.",
    )
    constraint_cache: float = Field(
        0.25,
        ge=0,
        description="GiB of memory for compiled constraints that no request uses. 0 keeps none.",
    )
    max_outputs: int = Field(64, ge=1, description="Maximum outputs per request (n).")
    max_waiting: int = Field(4096, ge=1, description="Maximum requests in the engine's queue.")
    max_message_bytes: int = Field(
        64 << 20, ge=1 << 16, description="Maximum size of a message from a router, in bytes."
    )
    max_failed_steps: int = Field(
        3,
        ge=1,
        description="Consecutive failed steps after which the engine exits with an error.",
    )
    step_timeout: float | None = Field(
        None,
        ge=0,
        description="Seconds after which a step counts as hung and the engine exits with an"
        " error; 0 disables the limit. Default: 300 on a CPU, 120 on a GPU.",
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="What routers send the engine. prefill: prompts; requests go on at an engine of"
        " another role after their first token. decode: these, and requests with a short prompt."
        " both: whole requests. Where no other engine can serve the rest, any role serves all.",
    )
    peer_ca: Path | None = Field(
        None,
        description="PEM file of the certificate authorities that sign other engines' certificates,"
        " of which blocks are copied. The engine shows them its --tls-cert. Default:"
        " --tls-client-ca; without TLS none.",
    )
    peer_tls_name: str | None = Field(
        None,
        description="Name expected in other engines' certificates. Default: the host by which the"
        " router knows the engine.",
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that running requests have to finish after SIGTERM."
    )

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        """Refuse empty and repeated names."""
        if "" in names:
            raise ValueError("a name is empty")
        if len(set(names)) != len(names):
            raise ValueError("has a name twice")
        return names

    @field_validator("lora")
    @classmethod
    def _adapters(cls, adapters: list[str]) -> list[str]:
        """Refuse malformed and repeated adapters."""
        for text in adapters:
            name, equals, path = text.partition("=")
            if not (equals and path) or not ADAPTER_NAME.fullmatch(name):
                raise ValueError(f"{text[:256]!r} is not NAME=PATH; {ADAPTER_NAMES}")
        names = [text.partition("=")[0] for text in adapters]
        if len(set(names)) != len(names):
            raise ValueError("names an adapter twice")
        return adapters

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        batched, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if batched is not None and seqs is not None and batched < seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({batched}) must be at least --max-num-seqs"
                f" ({seqs}): every running sequence decodes a token per step"
            )
        return self

    @model_validator(mode="after")
    def _disk_has_prefixes(self) -> Self:
        if self.kv_disk is None:
            return self
        if not self.enable_prefix_caching or self.swap_space == 0:
            raise ValueError("--kv-disk needs prefix caching and --swap-space")
        if self.ranks > 1:
            raise ValueError(f"--kv-disk {self._with_ranks}: {KV_DISK.tensor}")
        return self

    @model_validator(mode="after")
    def _spills_alone(self) -> Self:
        if self.kv_spill is None:
            return self
        if self.ranks > 1:
            raise ValueError(f"--kv-spill {self._with_ranks}: {KV_SPILL.tensor}")
        if self.draft_model is not None:
            raise ValueError("--kv-spill does not work with --draft-model")
        return self

    @model_validator(mode="after")
    def _draft_model_drafts(self) -> Self:
        if (self.speculation == "draft") is not (self.draft_model is not None):
            raise ValueError("--speculation draft and --draft-model need each other")
        return self

    @model_validator(mode="after")
    def _experts_have_ranks(self) -> Self:
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("--expert-parallel needs --tensor-parallel-size above 1")
        return self

    @model_validator(mode="after")
    def _nodes_share_ranks(self) -> Self:
        if self.ranks % self.nnodes:
            raise ValueError(f"--nnodes {self.nnodes} does not divide the {self.ranks} ranks")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes}")
        if (self.nnodes > 1) is not (self.master_addr is not None):
            raise ValueError("--nnodes above 1 and --master-addr need each other")
        return self

    @model_validator(mode="after")
    def _split_fits_stages(self) -> Self:
        if self.pipeline_split is None:
            return self
        layers = self.stage_layers
        if len(layers) != self.pipeline_parallel_size or not all(layers):
            raise ValueError(
                f"--pipeline-split {self.pipeline_split} must name one number of layers, at least"
                f" 1, for each of {self.pipeline_parallel_size} stages (--pipeline-parallel-size)"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_names_of_their_own(self) -> Self:
        """Refuse an adapter with a name of the model."""
        for name in self.model_names:
            if name in self.adapters:
                raise ValueError(
                    f"--lora {name} has a name of the model: give it another, or change"
                    " --served-model-name"
                )
        return self

    @property
    def peer_tls(self) -> Tls | None:
        """TLS files of the connections to other engines; None: plaintext."""
        ca = self.peer_ca or self.tls_client_ca
        if self.tls_cert is None and ca is None:
            return None
        return Tls(ca, self.tls_cert, self.tls_key, self.peer_tls_name)

    @property
    def listeners(self) -> list[Listener]:
        """Addresses to listen on, except a default metrics port, which may be replaced."""
        listeners = [Listener(self.host, self.port)]
        if "metrics_port" in self.model_fields_set:
            listeners.append(metrics_listener(self.host, self.metrics_port))
        return listeners

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine accepts LoRA adapters."""
        return self.enable_lora or bool(self.lora)

    @property
    def adapters(self) -> dict[str, str]:
        """The directories of the adapters to load at the start, by name."""
        pairs = (text.partition("=") for text in self.lora)
        return {name: path for name, _, path in pairs}

    @property
    def ranks(self) -> int:
        """Number of ranks: processes that each hold a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def machines(self) -> Machines:
        """The machines that the ranks are on."""
        return Machines(self.nnodes, self.node_rank, self.master_addr, self.master_port)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of layers of each stage; empty if they are to be balanced."""
        return (
            () if self.pipeline_split is None else tuple(map(int, self.pipeline_split.split(",")))
        )

    @property
    def _with_ranks(self) -> str:
        flags = "--tensor-parallel-size or --pipeline-parallel-size above 1"
        return f"does not work with {flags}"

    @property
    def source(self) -> str:
        """The model's source: the value of --model, with its revision."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def model_names(self) -> list[str]:
        """The names of the model in requests; answers have the first."""
        return self.served_model_name or [self.model]

    @property
    def model_name(self) -> str:
        """The name of the model in answers."""
        return self.model_names[0]
