"""The models whose vision encoders are served, and the files of their processors."""

from pathlib import Path

from octavo.common.models.json_files import CONFIG, read_json

IMAGE_FAMILIES = frozenset(
    {
        "gemma3",
        "idefics3",
        "internvl",
        "llama4",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "smolvlm",
    }
)
"""Their types in transformers; each is tested against transformers."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that say how images become what a vision encoder takes."""


def reads_images(directory: Path) -> bool:
    """Return whether the model of a directory reads images, by its config."""
    config = directory / CONFIG
    return config.is_file() and read_json(config).get("model_type") in IMAGE_FAMILIES
