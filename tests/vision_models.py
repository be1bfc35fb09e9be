"""Tiny random models that read images, each with its tokenizer, processor and chat template."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 400
IMAGE_TOKEN = VOCABULARY - 1
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
}
IN_PARTS = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        config: Settings of its config.
        images: Settings of its image processor.
        processor: Settings of its processor.
        shown: What its chat template writes for an image.
        tokens: Its special tokens; the image token comes last of all.
        image_token: The token whose embeddings images replace.
        roles: Names of special tokens in the tokenizer's config.
        model_type: Its type in transformers, if it is not its name here.
    """

    config: dict[str, Any]
    images: dict[str, Any]
    processor: dict[str, Any]
    shown: str
    image_token: str
    tokens: tuple[str, ...] = ()
    roles: dict[str, str] = field(default_factory=dict)
    model_type: str = ""


TILES = tuple(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4))
IDEFICS = {
    "config": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VISION,
        "scale_factor": 2,
        "image_token_id": IMAGE_TOKEN,
    },
    "images": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    "processor": {"image_seq_len": 4},
    "shown": "<image>",
    "image_token": "<image>",
    "tokens": ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES),
}
QWEN = {
    "shown": "<|vision_start|><|image_pad|><|vision_end|>",
    "image_token": "<|image_pad|>",
    "tokens": ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
}
QWEN_TOKENS = {"vision_start_token_id": 260, "vision_end_token_id": 261, "video_token_id": 262}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 16 * 16, "longest_edge": 80 * 80},
}
LLAVA_TILES = {
    "size": {"height": 32, "width": 32},
    "crop_size": {"height": 32, "width": 32},
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
}
LLAVA_IN_TILES = {
    "image_token_id": IMAGE_TOKEN,
    "image_token_index": IMAGE_TOKEN,
    "image_grid_pinpoints": LLAVA_TILES["image_grid_pinpoints"],
}
FAMILIES = {
    "smolvlm": Family(**IDEFICS),
    "idefics3": Family(**IDEFICS),
    "llava": Family(
        config={
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
        },
        images={
            "image_processor_type": "LlavaImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
        processor={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        shown="<image>\n",
        image_token="<image>",
    ),
    "llava_pixtral": Family(
        config={
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 16},
            "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 16, "image_size": 64},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
        },
        images={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 32},
            "patch_size": {"height": 8, "width": 8},
        },
        processor={"processor_class": "PixtralProcessor", "patch_size": 8},
        shown="[IMG]",
        image_token="[IMG]",
        tokens=("[IMG_BREAK]", "[IMG_END]"),
        model_type="llava",
    ),
    "llava_next": Family(
        config={
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
            **LLAVA_IN_TILES,
        },
        images=LLAVA_TILES
        | {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 32},
        },
        processor={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        shown="<image>\n",
        image_token="<image>",
    ),
    "llava_onevision": Family(
        config={
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
                **VISION,
            },
            "video_token_id": 260,
            "video_token_index": 260,
            **LLAVA_IN_TILES,
        },
        images={"image_processor_type": "LlavaOnevisionImageProcessor", **LLAVA_TILES},
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        shown="<image>\n",
        image_token="<image>",
        tokens=("<video>",),
    ),
    "gemma3": Family(
        config={
            "text_config": {**TEXT, "head_dim": 16, "sliding_window": 512},
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "mm_tokens_per_image": 16,
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": 260,
            "eoi_token_index": 261,
        },
        images={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
        },
        processor={"image_seq_length": 16},
        shown="<start_of_image>",
        image_token="<image_soft_token>",
        tokens=("<start_of_image>", "<end_of_image>"),
        roles={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "mistral3": Family(
        config={
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 16},
            "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 16, "image_size": 64},
            "spatial_merge_size": 2,
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
        },
        images={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 64},
            "patch_size": {"height": 8, "width": 8},
        },
        processor={"patch_size": 8, "spatial_merge_size": 2},
        shown="[IMG]",
        image_token="[IMG]",
        tokens=("[IMG_BREAK]", "[IMG_END]"),
    ),
    "qwen2_vl": Family(
        config={
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": TEXT["hidden_size"],
                "num_heads": 2,
                "patch_size": 8,
            },
            "image_token_id": IMAGE_TOKEN,
            **QWEN_TOKENS,
        },
        images=QWEN_IMAGES | {"patch_size": 8},
        processor={},
        **QWEN,
    ),
    "qwen2_5_vl": Family(
        config={
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "patch_size": 8,
                "window_size": 32,
                "fullatt_block_indexes": [1],
                "out_hidden_size": TEXT["hidden_size"],
            },
            "image_token_id": IMAGE_TOKEN,
            **QWEN_TOKENS,
        },
        images=QWEN_IMAGES | {"patch_size": 8},
        processor={},
        **QWEN,
    ),
    "qwen3_vl": Family(
        config={
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "patch_size": 8,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
                "out_hidden_size": TEXT["hidden_size"],
            },
            "image_token_id": IMAGE_TOKEN,
            **QWEN_TOKENS,
        },
        images=QWEN_IMAGES | {"patch_size": 8},
        processor={},
        **QWEN,
    ),
    "llama4": Family(
        config={
            "text_config": {
                **TEXT,
                "num_hidden_layers": 4,
                "head_dim": 16,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 1, 1, 0],
                "attention_chunk_size": 48,
                "floor_scale": 32,
            },
            "vision_config": {
                **VISION,
                "vision_output_dim": 48,
                "projector_input_dim": 48,
                "projector_output_dim": 48,
                "intermediate_size": VISION["hidden_size"] * 4,
                "pixel_shuffle_ratio": 0.5,
            },
            "image_token_index": IMAGE_TOKEN,
        },
        images={"size": {"height": 32, "width": 32}, "max_patches": 4},
        processor={"patch_size": 8},
        shown="<|image|>",
        image_token="<|patch|>",
        tokens=(
            *("<|image|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
    ),
    "internvl": Family(
        config={
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": [8, 8],
                "image_size": [32, 32],
            },
            "image_token_id": IMAGE_TOKEN,
        },
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "crop_to_patches": True,
            "max_patches": 4,
        },
        processor={"image_seq_length": 4},
        shown="<IMG_CONTEXT>\n",
        image_token="<IMG_CONTEXT>",
        tokens=("<img>", "</img>", "<video>"),
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
}


def save_vision_model(kind: str, path: Path) -> PreTrainedModel:
    """Save a tiny random model of a family, with all its files; return it in float32."""
    return save_family(kind, FAMILIES[kind], path)


def save_family(
    kind: str,
    family: Family,
    path: Path,
    *,
    std: float = 0.15,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Save a random model of a type, with all its files, and return it.

    Large weights make the argmax clear, so that rounding does not decide it.
    """
    config = AutoConfig.for_model(family.model_type or kind, **family.config)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        config, dtype=dtype, attn_implementation="eager"
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(path)
    _tokenizer(family).save_pretrained(path)
    images = {"image_processor_type": _image_processor(kind), **family.images}
    (path / "preprocessor_config.json").write_text(json.dumps(images))
    (path / "processor_config.json").write_text(json.dumps(family.processor))
    return model.eval()


def _image_processor(kind: str) -> str:
    return {"smolvlm": "SmolVLMImageProcessor", "idefics3": "Idefics3ImageProcessor"}.get(kind, "")


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, whose last token stands for images."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    control = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", *family.tokens]
    control += [f"<unused{i}>" for i in range(IMAGE_TOKEN - len(vocabulary) - len(control))]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (*control, family.image_token)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=family.roles
    )
    made.chat_template = IN_PARTS.replace("IMAGE", family.shown)
    return made
